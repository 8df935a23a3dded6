"""An agent that reads files by calling a tool, while a policy clears what it no longer needs.

Async. `python examples/agent_loop.py [HOST:PORT]`
"""

from __future__ import annotations

import asyncio
import sys

from leyline_policies import TruncateOlderThan
from leyline_sdk import AppliedEdit, AsyncLeyline, AsyncSession

READ_FILE = {
    "name": "read_file",
    "description": "Read a text file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
FILES = {
    "net.ini": "mode = fast\nport = 8123\nhost = see alt.ini\ntimeout = 30s\n",
    "alt.ini": "host = bravo\nsize = 7\nlimit = 450\nlevel = high\n",
}
QUESTIONS = ["What is port in net.ini?", "What is host in net.ini?", "What is size in alt.ini?"]


async def ask(session: AsyncSession, question: str) -> str:
    """The loop: append, generate, run the tools, until no tool is called."""
    await session.append(question)
    for _ in range(6):
        reply = await session.complete(max_tokens=96)
        if not reply.tool_calls:
            return reply.text
        results = {
            call.id: FILES.get(call.arguments.get("path", ""), "error: no such file") for call in reply.tool_calls
        }
        await session.append_results(results)
    return "gave up"


def report(edit: AppliedEdit) -> None:
    print(f"  {edit.policy}: {edit.removed} -> {edit.inserted} tokens, {edit.receipt.kept} after it kept")


async def main(target: str | None = None) -> None:
    async with AsyncLeyline(target=target) as client:
        session = await client.session(
            system="You answer questions about files. Read them with read_file.",
            tools=[READ_FILE],
            policies=[TruncateOlderThan(older_than=2)],
            on_edit=report,
        )
        for question in QUESTIONS:
            print(f"{question} {await ask(session, question)}")
        await session.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
