"""A session, a tool call, a streamed answer, and what it cost. `python examples/quickstart.py [HOST:PORT]`"""

from __future__ import annotations

import sys

from leyline_sdk import Leyline

READ_FILE = {
    "name": "read_file",
    "description": "Read a text file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}


def main(target: str | None = None) -> None:
    with Leyline(target=target) as client:
        info = client.server_info()
        print(f"{info.model} on {info.device}: room for {info.pool.num_slots:,} tokens")

        system = "You answer questions about files. Read them with read_file."
        with client.session(system=system, tools=[READ_FILE]) as session:
            session.append("What is port in net.ini?")
            for call in session.complete(max_tokens=64).tool_calls:
                print(f"it calls {call.name}({call.arguments})")
                session.tool_result(call, "mode = fast\nport = 8123\n")

            with session.generate(max_tokens=32) as stream:
                for text in stream.text:
                    print(text, end="", flush=True)
                reply = stream.final()
            print(f"\n{reply.finish_reason}: computed {reply.usage.computed}, reused {reply.usage.reused}")

            # Leaving the block only detaches: the session lives on and is resumed by its id.
            again = client.session(session.id)
            print(f"resumed {again.id}: {len(again.transcript)} messages, {again.transcript.num_tokens} tokens")
            again.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
