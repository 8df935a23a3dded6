"""A session, a message, a streamed reply, and what it cost. `python examples/quickstart.py [HOST:PORT]`"""

from __future__ import annotations

import sys

from leyline_sdk import Leyline


def main(target: str | None = None) -> None:
    with Leyline(target=target) as client:
        info = client.server_info()
        print(f"{info.model} on {info.device}: room for {info.pool.num_slots:,} tokens")

        with client.session(system="You answer questions about files.") as session:
            session.append("What is port in net.ini?")
            with session.generate(max_tokens=32) as stream:
                for text in stream.text:
                    print(text, end="", flush=True)
                reply = stream.final()
            print(f"\n{reply.finish_reason}: computed {reply.usage.computed}, generated {reply.usage.generated}")

            # Leaving the block only detaches: the session lives on and is resumed by its id.
            again = client.session(session.id)
            print(f"resumed {again.id}: {len(again.transcript)} messages, {again.transcript.num_tokens} tokens")
            again.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
