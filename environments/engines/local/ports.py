# SPDX-License-Identifier: Apache-2.0
"""The listening sockets of an environment: bound once, shared by all of its replicas.

A listening socket reserves its port until the shims that hold it have ended. For an environment
that is started again later, a small file reserves the port, in a folder that all homes of this user
share:

    /tmp/openenvd-<uid>-ports/21000    {"environment": "echo", "runs": "<home>/run", "replica": ID}

Such a reservation holds as long as a run file in `runs` has the environment at the port; that of
the named replica, if there is one, is read first. The gateway has a reservation, too. Only a
process that has bound the port writes its file, so no two write the same. The folder counts only if
this user alone can write to it.

A free port is searched among the first ports of the range, then at random, so that the search stays
short among thousands of environments.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import random
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ....schema.errors import OperationFailed, PortInUse
from ....schema.layout import GATEWAY, check_private, make_private_in_shared
from ....system.net.listening_sockets import open_listening_sockets
from ... import run_files
from ...shim.client import read_run_file
from ...shim.files import read_json, write_json

log = logging.getLogger(__name__)

# Below the ephemeral ranges of Linux (32768) and macOS (49152), so that no outgoing connection
# ever takes one of them.
FIRST_PORT = 21000
LAST_PORT = 24999
ORDERED_PORTS = 8  # tried first, so that a home with few environments has the lowest ports


# Not `TMPDIR`: whatever their variables, all daemons of a user must find the same folder.
RESERVATIONS = Path(f"/tmp/openenvd-{os.getuid()}-ports")  # noqa: S108  private, and ours


@dataclass(frozen=True, slots=True)
class PortOwner:
    """An environment of one home, or its gateway."""

    environment: str
    runs: Path  # the home's run files
    replica: str | None = field(default=None, compare=False)  # one that has had the port


def open_listeners(
    host: str, port: int | None, owner: PortOwner, *, taken: Collection[int] = ()
) -> list[socket.socket]:
    """Open and reserve listening TCP sockets on `port`, or on the first free port of the range.

    Ports that are `taken`, by replicas of the owner, are skipped. Raises `PortInUse`, which names
    the owner, `OperationFailed` if the port is root's, and `OSError` if the address is not ours.
    """
    # A search reads each other owner's run files at most once.
    ports_of = functools.cache(lambda other: frozenset(_ports_of(other)))
    every = range(FIRST_PORT, LAST_PORT + 1)
    ordered, others = every[:ORDERED_PORTS], every[ORDERED_PORTS:]
    wanted = [*ordered, *random.sample(others, len(others))] if port is None else [port]
    for candidate in wanted:
        # A reserved port is not even bound for a moment: an engine may be about to publish it.
        if candidate in taken or reserved_for(candidate, owner, ports_of) is not None:
            continue
        try:
            listeners = open_listening_sockets(host, candidate)
        except OSError as exc:
            if exc.errno == errno.EACCES:
                text = f"port {candidate} is closed to ordinary users, as those below 1024 are"
                raise OperationFailed(text, "choose a --port above 1023, such as 25000") from exc
            if exc.errno != errno.EADDRINUSE:
                raise
            continue
        if reserved_for(candidate, owner) is None:  # another one may have reserved it meanwhile
            reserve(candidate, owner)
            return listeners
        for listener in listeners:
            listener.close()
    if port is not None:
        raise port_in_use(port)
    hint = "take some environments down (openenv down NAME), or choose a port: --port 25000"
    raise PortInUse(f"all ports from {FIRST_PORT} to {LAST_PORT} are in use", hint)


def reserved_for(
    port: int,
    besides: PortOwner | None = None,
    ports_of: Callable[[PortOwner], Iterable[int]] | None = None,
) -> PortOwner | None:
    """Return the owner that has a port, or will be started at it, unless it is `besides`."""
    owner = _read_reservation(port)
    if owner is None or owner == besides:
        return None
    named = read_run_file(owner.runs / owner.replica) if owner.replica else None
    has_it = named is not None and named.get("port") == port
    return owner if has_it or port in (ports_of or _ports_of)(owner) else None


def _read_reservation(port: int) -> PortOwner | None:
    """Return the owner in a port's reservation, which may be out of date."""
    try:
        check_private(RESERVATIONS)
        data = read_json(RESERVATIONS / str(port))
        if data is None:
            return None
        return PortOwner(data["environment"], Path(data["runs"]), data.get("replica"))
    except (OSError, LookupError, TypeError):
        return None


def _ports_of(owner: PortOwner) -> Iterator[int]:
    """Yield the ports in an owner's run files, of which the gateway has only one."""
    gateway = read_run_file(owner.runs / owner.environment)
    port = gateway.get("port") if gateway else None  # a damaged file may have none
    if isinstance(port, int):
        yield port
    for run_file in run_files.each_of_environment(owner.runs, owner.environment):
        yield run_file.port


def renew_reservations(runs: Path, replicas: Iterable[run_files.RunFile]) -> None:
    """Reserve the ports of a home's replicas again, as the system may have emptied `/tmp`."""
    owners = {port: PortOwner(GATEWAY, runs) for port in _ports_of(PortOwner(GATEWAY, runs))}
    for run_file in replicas:
        owner = PortOwner(run_file.environment, runs, run_file.replica_id)
        owners.setdefault(run_file.port, owner)
    for port, owner in owners.items():
        written = _read_reservation(port) if port else owner
        is_same = written == owner and written.replica == owner.replica
        if not is_same and reserved_for(port, owner) is None:
            reserve(port, owner)


def reserve(port: int, owner: PortOwner) -> None:
    """Write the reservation of a port that the owner has bound."""
    try:
        make_private_in_shared(RESERVATIONS)
        data = {"environment": owner.environment, "runs": str(owner.runs), "replica": owner.replica}
        write_json(str(RESERVATIONS / str(port)), data)
    except OSError as exc:
        _warn_once(RESERVATIONS, exc.strerror or str(exc))


@functools.cache
def _warn_once(folder: Path, problem: str) -> None:
    text = "no ports are reserved in %s (%s): others can take that of a restarting environment"
    log.warning(text, folder, problem)


def holder_of(port: int) -> tuple[int, str] | None:
    """Return the pid and name of the listener on a port; None: there is none, or it is unknown."""
    import psutil  # 1 MB, for this message alone

    with contextlib.suppress(psutil.Error):
        for item in psutil.net_connections(kind="tcp"):
            if item.pid and item.status == psutil.CONN_LISTEN and port in item.laddr[1:2]:
                return item.pid, psutil.Process(item.pid).name()
    return None


def port_in_use(port: int) -> PortInUse:
    """Return the error that says who has a port."""
    hint = "choose another --port, or leave it out to get a free one"
    if (holder := holder_of(port)) is not None:
        pid, name = holder
        return PortInUse(f"port {port} is in use by {name} (pid {pid})", hint)
    if (owner := reserved_for(port)) is not None:
        name, home = owner.environment, owner.runs.parent
        text = f"port {port} is reserved for {name} of {home}, which is being restarted"
        return PortInUse(text, hint)
    return PortInUse(f"port {port} is in use by a process of another user", hint)
