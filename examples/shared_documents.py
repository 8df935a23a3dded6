"""Three agents with the same three documents in different orders: computed once, reused wherever they stand.

`python examples/shared_documents.py [HOST:PORT]`
"""

from __future__ import annotations

import sys

from leyline_sdk import Leyline, Reuse, Session, assemble

SYSTEM = "You answer questions about files. Read them with read_file."
READ_FILE = {
    "name": "read_file",
    "description": "Read a text file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
TEAM = "owner = bravo\nlead = delta\nsize = 7\nsince = 2019\nzone = north\nchat = on\nlanguage = plain\n"
SITE = "region = west\nrack = 12\npower = high\nbackup = none\nfloor = 3\nkey = yellow\ncooling = water\n"
RULES = "review = two\nrelease = monthly\nbranch = main\ntests = green\nlines = short\nnames = lower\n"
FILES = {"net.ini": "mode = fast\nport = 8123\n", "disk.ini": "quota = 96\nlevel = high\n", "log.ini": "keep = 12\n"}
AGENTS = {
    "What is port in net.ini?": [TEAM, SITE, RULES],
    "What is level in disk.ini?": [RULES, TEAM, SITE],
    "What is keep in log.ini?": [SITE, RULES, TEAM],
}


def work(session: Session) -> str:
    """The loop of any agent; each reply says where its rows came from."""
    for _ in range(6):
        reply = session.complete(max_tokens=48)
        cache = reply.cache
        print(
            f"  computed {cache.computed} of {reply.usage.context} tokens; reused {cache.kept} of its own, "
            f"{cache.prefix_hit} by prefix, {cache.content_hit} by content {list(cache.content_spans)}"
        )
        if not reply.tool_calls:
            return reply.text
        session.append_results({call.id: FILES.get(call.arguments.get("path", ""), "") for call in reply.tool_calls})
    return "gave up"


def main(target: str | None = None) -> None:
    with Leyline(target=target) as client:
        for number, (question, documents) in enumerate(AGENTS.items()):
            session = client.session(system=SYSTEM, tools=[READ_FILE], reuse=Reuse.CONTENT)
            if number == 0:  # else the first agent computes them, each behind the one before it
                print(f"warmed: computed {[one.computed for one in session.warm(documents)]} tokens")
            session.append(assemble([*documents, question]))
            print(question)
            print(f"  {work(session)}")
            session.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
