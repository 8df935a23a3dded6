import json
import subprocess
import sys

import pytest

from leyline_proto.refusal import Refusal
from leyline_server.model.chat import PlainFormat, TemplateFailed, load_renderer, select_format
from leyline_server.model.tokenizer import TextTokenizer, TokenizerError

DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]


def test_each_checkpoint_gets_its_family(open_case):
    names = {name: open_case(name).fmt.name for name in ("tiny", "v3", "v2", "v2 without tools")}
    assert names == {"tiny": "tiny", "v3": "deepseek_v3", "v2": "deepseek_v2", "v2 without tools": "deepseek_v2"}


def test_the_shipped_template_and_format_are_one(open_case):
    case = open_case("shipped")
    assert case.fmt.name == "tiny"
    assert case.fmt.differences == ()
    assert case.fmt.lacking == {}


def test_v3s_template_is_reported_where_it_is_broken(open_case):
    differences = open_case("v3").fmt.differences
    broken = [d for d in differences if "tool round 2" in d and "role assistant with 1 calls" in d]
    assert len(broken) == 1
    assert not [d for d in differences if "tool round 1" in d and "role assistant with" in d]
    assert not [d for d in differences if "role tool, tool round 1" in d]
    assert any("drops tools' schemas" in d for d in differences)
    assert any("before anew" in d for d in differences)


def test_v2s_template_is_reported_to_drop_results(open_case):
    differences = open_case("v2").fmt.differences
    assert any("drops a message of role tool" in d for d in differences)
    assert any("encoded apart" in d for d in differences)
    assert not any("drops a message of role tool" in d for d in open_case("v2 without tools").fmt.differences)


def test_a_foreign_template_gets_the_plain_format(make_checkpoint):
    directory = make_checkpoint(DEEPSEEK, "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}")
    tokenizer = TextTokenizer.from_dir(directory)
    fmt = select_format(tokenizer, "deepseek_v3", load_renderer(directory), stop_ids=frozenset({1}))
    assert isinstance(fmt, PlainFormat)
    assert "template writes '[system]" in fmt.reason
    assert fmt.stop_ids == {1}
    assert set(fmt.lacking) == {"MESSAGES", "TOOLS", "REASONING"}
    for call in (lambda: fmt.open_assistant(False), fmt.close_assistant, lambda: fmt.render(None, (), (), True)):
        with pytest.raises(Refusal) as caught:
            call()
        assert caught.value.reason == "NOT_SUPPORTED"
        assert caught.value.metadata["feature"] == "MESSAGES"
    ids = fmt.encode("text as it is")
    assert fmt.decode(ids) == fmt.parse(ids).text == "text as it is"


def test_another_generation_prompt_is_reported(make_checkpoint, v3_dir):
    """R1's template makes the model think by writing the marker for it."""
    template = json.loads((v3_dir / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    prompt = "{{'<｜Assistant｜>'}}{% endif %}"
    assert template.endswith(prompt)
    template = template.removesuffix(prompt) + "{{'<｜Assistant｜><think>\\n'}}{% endif %}"
    directory = make_checkpoint(DEEPSEEK, template)
    fmt = select_format(TextTokenizer.from_dir(directory), "deepseek_v3", load_renderer(directory))
    assert fmt.name == "deepseek_v3"
    assert fmt.differences[0].startswith("before an answer the template writes '<｜Assistant｜><think>")


def test_a_foreign_vocabulary_gets_the_plain_format(make_checkpoint):
    tokenizer = TextTokenizer.from_dir(make_checkpoint(["<s>", "</s>"]))
    fmt = select_format(tokenizer, "deepseek_v2", None)
    assert isinstance(fmt, PlainFormat)
    assert "<|bos|>" in fmt.reason


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_without_a_template_the_model_type_decides(make_checkpoint, model_type):
    tokenizer = TextTokenizer.from_dir(make_checkpoint(DEEPSEEK))
    fmt = select_format(tokenizer, model_type, None)
    assert fmt.name == model_type
    assert "no chat template" in fmt.differences[0]


def test_the_bound_of_ids_is_the_models(open_case):
    case = open_case("tiny")
    assert select_format(case.tokenizer, "deepseek_v2", None, vocab_size=1000).vocab_size == 1000
    with pytest.raises(TokenizerError, match="bound is 400"):
        select_format(case.tokenizer, "deepseek_v2", None, vocab_size=400)


def test_a_broken_template_says_so(make_checkpoint, tmp_path):
    with pytest.raises(TemplateFailed, match="can't be read"):
        load_renderer(make_checkpoint(DEEPSEEK, "{% for %}"))
    assert load_renderer(tmp_path) is None
    directory = make_checkpoint(DEEPSEEK, "{{ raise_exception('not today') }}")
    fmt = select_format(TextTokenizer.from_dir(directory), "deepseek_v3", load_renderer(directory))
    assert "not today" in fmt.reason


def test_a_template_runs_in_a_sandbox(make_checkpoint):
    renderer = load_renderer(make_checkpoint(DEEPSEEK, "{{ messages.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(TemplateFailed, match="Security"):
        renderer([], (), False)


def test_nothing_here_imports_torch():
    code = "import sys; import leyline_server.model.chat; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
