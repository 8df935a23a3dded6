from window_code import means


def test_of_one():
    assert means([1, 2, 3], 1) == [1, 2, 3]


def test_of_two():
    assert means([1, 3, 5], 2) == [2, 4]


def test_too_short():
    assert means([1], 2) == []
