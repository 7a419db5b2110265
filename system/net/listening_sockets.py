# SPDX-License-Identifier: Apache-2.0
"""Listening sockets of one TCP address, with room for thousands of unaccepted connections.

The kernel keeps at most `somaxconn` connections (4,096 by default) for a listening socket, and
drops the rest; their clients come again after 1, 3 and 7 s. So an address has as many listening
sockets as `QUEUE_LENGTH` takes; the kernel spreads connections over them (`SO_REUSEPORT`, Linux).

With that option alone any process of the same user could listen at the address, unnoticed. So:

    first     listens before it has the option: it fails when anybody else has the address
    further   share its address from then on
    guard     bound to the address and never listening; then its options are taken away, so that it
              conflicts with a process that binds the address later

Where the kernel lets a stranger in all the same, or is not Linux, the first socket is all there is.
So it is for `::`: to keep strangers out takes a moment at another address of the port, and all of
them, of both families, are that one's.
Light: a shim imports it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

QUEUE_LENGTH = 32768  # connections that may wait to be accepted
MAX_LISTENERS = 8
BACKLOG = 65535  # of each; the kernel reduces it to `somaxconn`

_SOMAXCONN = "/proc/sys/net/core/somaxconn"


def open_listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Open an address's sockets and their guard. Raises `OSError`; `filename` is the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first = socket.socket(family, socket.SOCK_STREAM)
    try:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind((host, port))
        # Listen at once: with SO_REUSEADDR two sockets may be bound, but only one may listen.
        first.listen(BACKLOG)
    except OSError as exc:
        first.close()
        raise OSError(exc.errno, exc.strerror or str(exc), f"{host}:{port}") from exc
    return [first, *_further(first)]


def sockets_of(fds: str) -> list[socket.socket]:
    """Return the sockets of an environment variable: descriptors, separated by commas."""
    return [socket.socket(fileno=int(fd)) for fd in fds.split(",")]


def descriptors_text(fds: Iterable[int]) -> str:
    """Return the text that `sockets_of` reads."""
    return ",".join(map(str, fds))


def listening(sockets: Iterable[socket.socket]) -> list[socket.socket]:
    """Return the sockets that accept connections: all but the guard."""
    return [one for one in sockets if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]


def _further(first: socket.socket) -> list[socket.socket]:
    """Open the guard and the other listeners of an address; none if that would not be safe."""
    try:
        with open(_SOMAXCONN, encoding="ascii") as file:
            count = min(MAX_LISTENERS, -(-QUEUE_LENGTH // max(1, int(file.read()))))
    except (OSError, ValueError):  # not on Linux
        return []
    if count == 1:
        return []
    opened: list[socket.socket] = []
    first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        guard = _share(first)
        opened.append(guard)
        for _ in range(count - 1):
            opened.append(_share(first))
            opened[-1].listen(BACKLOG)
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        is_safe = _end_quick_binds(first.getsockname()[1])
        with contextlib.suppress(OSError):
            _share(first).close()  # then another process could bind it, too
            is_safe = False
    except OSError:
        is_safe = False
    if is_safe:
        return opened
    for one in opened:
        one.close()
    first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    return []


def _share(first: socket.socket) -> socket.socket:
    """Bind another socket to the address of the first; raises `OSError` if that is refused."""
    other = socket.socket(first.family, socket.SOCK_STREAM)
    try:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(first.getsockname())
    except OSError:
        other.close()
        raise
    return other


def _end_quick_binds(port: int) -> bool:
    """Make the kernel check all sockets of a port again before it allows another bind.

    The kernel caches that all sockets of a port are shared (`fastreuseport`, in
    `inet_connection_sock.c`). A short bind of an unshared socket at another address clears that.
    """
    for family, host in ((socket.AF_INET, "127.255.255.254"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as other:
                other.bind((host, port))
                return True
        except OSError:
            continue
    return False


def http_address(host: str, port: int) -> str:
    """Return the address that a client on this machine uses for a server bound to `host`."""
    if host in ("0.0.0.0", "::"):  # noqa: S104  compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
