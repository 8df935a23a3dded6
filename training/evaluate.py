"""Measures the model in free-running sessions on held-out names.

    python -m training.evaluate leyline_server/assets/tiny [--clear-after 2 --lengths 8 12 16]

Plain Hugging Face `generate`, greedy, many sessions side by side; the tools are a dictionary. Each assistant message is
generated from the whole conversation rendered anew, with outputs that have `--clear-after` or more assistant messages
after them replaced by `[cleared]` if asked for.
"""

import json
from argparse import ArgumentParser
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import DeepseekV2ForCausalLM

from training.histories import CLEARED, old_outputs
from training.render import (
    ARGS,
    ASSISTANT,
    BOS,
    CALL,
    END,
    END_CALL,
    PAD,
    READ_FILE,
    SYSTEM_PROMPT,
    Call,
    Message,
    encode,
)
from training.tasks import KINDS, Session, Task, make_session

MAX_NEW_TOKENS = 96
MAX_TURNS_PER_TASK = 6


def parse_message(ids: list[int], tokenizer: Tokenizer) -> Message:
    """The assistant message with these ids, `<|end|>` left out.

    Raises: ValueError where calls are malformed.
    """
    first_call = ids.index(CALL) if CALL in ids else len(ids)
    calls, rest = [], ids[first_call:]
    while rest:
        if rest[0] != CALL or ARGS not in rest or END_CALL not in rest:
            raise ValueError("malformed call")
        args, end = rest.index(ARGS), rest.index(END_CALL)
        calls.append(Call(tokenizer.decode(rest[1:args]), json.loads(tokenizer.decode(rest[args + 1 : end]))))
        rest = rest[end + 1 :]
    return Message("assistant", tokenizer.decode(ids[:first_call]), tuple(calls))


@dataclass
class Agent:
    """One session under way: the conversation so far, the files, what came of each task."""

    session: Session
    clear_after: int | None
    messages: list[Message] = field(default_factory=lambda: [Message("system", SYSTEM_PROMPT)])
    disk: dict[str, str] = field(default_factory=dict)
    results: list[tuple[Task, bool, str]] = field(default_factory=list)
    num_turns: int = 0
    num_prompt_tokens: int = 0
    _waiting: deque[Task] = field(init=False)
    _failure: str | None = None

    def __post_init__(self) -> None:
        self._waiting = deque(self.session.tasks)
        self._next_task()

    @property
    def is_done(self) -> bool:
        return not self._waiting

    def prompt(self, tokenizer: Tokenizer) -> list[int]:
        messages = self.messages
        if self.clear_after is not None:
            old = old_outputs(messages, self.clear_after)
            messages = [replace(m, content=CLEARED) if i in old else m for i, m in enumerate(messages)]
        ids = [BOS, *encode(messages, tokenizer, [READ_FILE])[0], ASSISTANT]
        self.num_prompt_tokens = len(ids)
        return ids

    def take(self, ids: list[int], tokenizer: Tokenizer) -> None:
        """Goes on from a generated message: runs its calls, or ends the task with its answer."""
        self.num_turns += 1
        try:
            message = parse_message(ids, tokenizer)
        except ValueError:
            message = Message("assistant", tokenizer.decode(ids, skip_special_tokens=False))
        self.messages.append(message)
        if not message.calls or self.num_turns >= MAX_TURNS_PER_TASK:
            self._finish(message.content)
            return
        self.messages += [Message("tool", self._read(call)) for call in message.calls]

    def _read(self, call: Call) -> str:
        path = call.arguments.get("path") if isinstance(call.arguments, dict) else None
        failure, self._failure = self._failure, None
        return failure or self.disk.get(str(path), "error: no such file")

    def _finish(self, answer: str) -> None:
        task = self._waiting.popleft()
        self.results.append((task, answer.strip() == task.answer, answer))
        if self._waiting:
            self._next_task()

    def _next_task(self) -> None:
        task = self._waiting[0]
        self.disk.update(task.files)
        self.num_turns, self._failure = 0, task.fail_first
        self.messages.append(Message("user", task.question))


@torch.inference_mode()
def generate(model: DeepseekV2ForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations up to `<|end|>`; prompts are padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=(ids != PAD).long(),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    rows = output[:, width:].tolist()
    return [row[: row.index(END)] if END in row else row for row in rows]


def run_sessions(
    model: DeepseekV2ForCausalLM, tokenizer: Tokenizer, sessions: Iterable[Session], clear_after: int | None, batch: int
) -> list[Agent]:
    """Runs all sessions to their ends, `batch` of them side by side, prompts of like length together."""
    agents = [Agent(session, clear_after) for session in sessions]
    while waiting := [agent for agent in agents if not agent.is_done]:
        prompts = sorted(((agent.prompt(tokenizer), agent) for agent in waiting), key=lambda pair: len(pair[0]))
        for start in range(0, len(prompts), batch):
            part = prompts[start : start + batch]
            for (_, agent), ids in zip(part, generate(model, [prompt for prompt, _ in part]), strict=True):
                agent.take(ids, tokenizer)
    return agents


def summarize(agents: list[Agent], label: str) -> dict[str, Any]:
    """Shares of right answers, of sessions right throughout and of each kind, printed as one line."""
    total: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for agent in agents:
        for task, is_right, _ in agent.results:
            total[task.kind] += 1
            right[task.kind] += is_right
    whole = sum(all(is_right for _, is_right, _ in agent.results) for agent in agents)
    summary = {
        "sessions": label,
        "answers": round(sum(right.values()) / sum(total.values()), 4),
        "whole": round(whole / len(agents), 4),
        **{kind: round(right[kind] / total[kind], 4) for kind in KINDS if total[kind]},
        "num_answers": sum(total.values()),
        "max_prompt_tokens": max(agent.num_prompt_tokens for agent in agents),
    }
    print(json.dumps(summary), flush=True)
    return summary


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--sessions", type=int, default=60, help="sessions of each length")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(range(1, 9)), help="tasks in a session")
    parser.add_argument("--clear-after", type=int, help="clear outputs with this many assistant turns after them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show-wrong", type=int, default=5)
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(f"{args.model}/tokenizer.json")
    model = DeepseekV2ForCausalLM.from_pretrained(args.model).float().to(args.device).eval()
    sessions = [
        make_session(Random(f"{args.seed}/{length}/{i}"), length)
        for length in args.lengths
        for i in range(args.sessions)
    ]
    agents = run_sessions(model, tokenizer, sessions, args.clear_after, args.batch)
    for length in args.lengths:
        summarize([agent for agent in agents if len(agent.session.tasks) == length], str(length))
    summarize(agents, "all")
    wrong = [(task, answer) for agent in agents for task, is_right, answer in agent.results if not is_right]
    for task, answer in wrong[: args.show_wrong]:
        print(f"wrong: {task.kind}: {task.question!r} -> {answer!r} instead of {task.answer!r}")


if __name__ == "__main__":
    main()
