from cart_code import Cart

PRICES = {"pen": 2, "book": 10}


def test_one_cart():
    cart = Cart(PRICES, {})
    cart.add("pen", 3)
    assert cart.total() == 6


def test_two_carts():
    first, second = Cart(PRICES), Cart(PRICES)
    first.add("book")
    second.add("pen")
    assert (first.total(), second.total()) == (10, 2)
