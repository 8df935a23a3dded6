"""Whether an address can be listened on, before anybody waits for a model.

Knows sockets alone. What it finds free can be taken by the time that the server listens: that is told then.
"""

from __future__ import annotations

import errno
import socket


def refused(host: str, port: int) -> str:
    """Why nobody could listen there now; empty when one can. Port 0 is any free one."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"host: {host!r} is no address of this machine: {error.strerror}"
    why = ""
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: a port that was just left is free
            try:
                one.bind(address)
            except OSError as error:
                told = "is in use" if error.errno == errno.EADDRINUSE else f"can't be listened on: {error.strerror}"
                why = why or f"port: {host}:{port} {told}"
            else:
                return ""  # one address of a name is enough for gRPC
    return why
