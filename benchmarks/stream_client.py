"""A client in a process of its own: opens a Generate stream on each session and reads them all to their ends.

    python -m benchmarks.stream_client ADDRESS MAX_TOKENS SESSION..

Prints "tokens N" when all have ended.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Sequence

from leyline_proto import leyline_pb2 as pb
from leyline_sdk.grpc_transport import AsyncGrpcTransport


async def read(transport: AsyncGrpcTransport, session_id: str, max_tokens: int) -> int:
    request = pb.GenerateRequest(
        request_id=uuid.uuid4().hex, session_id=session_id, max_tokens=max_tokens, raw=True, ignore_eos=True
    )
    tokens = 0
    async for event in transport.stream("Generate", request, 600.0, ()):
        tokens += len(event.delta.token_ids)
    return tokens


async def read_all(address: str, max_tokens: int, session_ids: Sequence[str]) -> int:
    transport = AsyncGrpcTransport(address)
    try:
        return sum(await asyncio.gather(*(read(transport, one, max_tokens) for one in session_ids)))
    finally:
        await transport.close()


if __name__ == "__main__":
    print("tokens", asyncio.run(read_all(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
