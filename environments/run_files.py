# SPDX-License-Identifier: Apache-2.0
"""Run files: each records one replica before it is started, so that every process finds it.

Each replica has a folder below `runs`, with the run file that its shim reads (`shim/`), or the
agent of its engine (`agent/`), which serves the same socket. A replica exists as long as its folder
does: a stop removes the folder last, so that no crash in between can lose a replica. An instance on
an engine is stopped by that engine; while the engine does not answer, the folder stays.

A run file that is damaged or removed, or that another version wrote, is set aside (`SetAside`): its
replica continues, and is neither watched nor restarted, which `status` says.

    its shim or agent answers at the socket that its id names    `down` stops it there
    it is damaged, and its shim does not answer                  it is ended by the shim's last
                                                                 status
    nothing shows that it has ended                              `down` fails and says what to do;
                                                                 it is tried again until the folder
                                                                 is removed

The daemon, its workers and engines' agents use this module at the same time: every function
tolerates that another process was faster. Functions that block say so.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import selectors
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..schema.errors import EngineFailed
from ..schema.layout import GATEWAY, Layout
from ..schema.protocol import HOST_CONFIG_VARIABLE, HOST_OPTIONS_VARIABLE
from ..schema.replica import RunFileData, StatusLine
from ..schema.spec import GRACE_SECONDS
from ..system.net.listening_sockets import http_address, open_listening_sockets
from ..system.process.descriptors import close_all
from ..system.process.process_identity import is_locked
from ..system.text.json_lines import Json
from .agent_client import EngineAddress, ask_agent
from .replica_state import State
from .shim import client
from .shim.files import LOCK_FILE_NAME, RUN_FILE_NAME, STATUS_FILE_NAME

OnSessions = Callable[[str, int], None]  # called with a replica's id, and its sessions
OnStatus = Callable[[str, StatusLine], bool]  # given an id and a status: is that the awaited one
LOCAL = "local"  # the provider of replicas below a shim

RUN_FILE_VERSION = 1
# The fields that each run file of this version has, and their types.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("replica_id", "environment", "request_id", "socket_path"), str),
    **dict.fromkeys(("log_path", "host"), str),
    **dict.fromkeys(("ordinal", "number", "port"), int),
    "created_at": (int, float),
}
# NAME-ORDINAL-LAUNCH, or NAME-ORDINAL-PART-LAUNCH, with a part of the id of another request that
# added the replica.
_REPLICA_ID = re.compile(r"(.+?)-\d+-(?:[0-9a-f]{4}-)?[^-]+")
AGENT_PAUSE_SECONDS = 0.2  # before another agent is started or asked
_MARGIN_SECONDS = 5.0  # beyond the grace, for the shim to kill, reap and report


@dataclass(frozen=True, slots=True)
class RunFile:
    """The record of one replica that was, or is being, started."""

    replica_id: str
    environment: str
    ordinal: int
    run_dir: Path
    socket_path: str
    log_path: str
    host: str
    port: int
    request_id: str  # the launch it belongs to
    number: int  # in the ids of its sessions; ordinals occur in each generation
    token: str | None  # which its clients must send
    created_at: float  # each attempt of a launch writes another time
    data: RunFileData  # the whole content

    @property
    def address(self) -> str:
        """Return its address for clients: the gateway's, if it is behind that."""
        if (address := self.data.get("address")) is not None:
            return address
        return http_address(*(endpoint_of(self) if self.is_elsewhere else (self.host, self.port)))

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it is reached at its instance's address, at no port of this machine."""
        return bool(self.data.get("is_elsewhere"))

    @property
    def is_at_gateway(self) -> bool:
        """Return whether its clients come through the gateway."""
        return self.data.get("address") is not None

    @property
    def provider(self) -> str:
        """Return its provider: `local`, below a shim; or an engine, behind its agent."""
        return self.data.get("provider") or LOCAL

    @property
    def engine(self) -> EngineAddress:
        """Return its engine, which is the one that was used at its launch."""
        return EngineAddress.of(self.provider, self.data.get("engine_variables") or {})

    @property
    def is_local(self) -> bool:
        """Return whether it runs below a shim."""
        return self.provider == LOCAL

    @property
    def max_sessions(self) -> int | None:
        """Return its share of the environment's sessions; None: as many as it can have."""
        share: int | None = server_options(self.data).get("max_sessions")
        return share

    @property
    def is_held(self) -> bool:
        """Return whether it is on standby: it accepts no connection while others serve."""
        return bool(self.data.get("held"))

    @classmethod
    def of(cls, run_dir: Path, data: RunFileData) -> RunFile:
        """Return the record of a replica with this content."""
        written: Mapping[str, Any] = data
        fields: dict[str, Any] = {key: written.get(key) for key in cls.__dataclass_fields__}
        return cls(**{**fields, "run_dir": run_dir, "data": data})


Known = Mapping[str, RunFile] | None  # by the replica's id


@dataclass(frozen=True, slots=True)
class SetAside:
    """A replica, or the gateway, whose run file cannot be used."""

    run_dir: Path
    environment: str
    is_damaged: bool  # else another version of openenvd wrote it

    @property
    def replica_id(self) -> str:
        """Return the replica's id, which is the name of its folder."""
        return self.run_dir.name

    @property
    def request_id(self) -> str:
        """Return the launch to which it belongs."""
        return self.replica_id.rpartition("-")[2]

    @property
    def is_gateway(self) -> bool:
        """Return whether it is the home's gateway."""
        return self.run_dir.name == GATEWAY

    @property
    def problem(self) -> str:
        """Return, as one clause, the path of the run file and why it cannot be used."""
        path = self.run_dir / RUN_FILE_NAME
        damage = "is damaged" if path.exists() else "was removed"
        why = damage if self.is_damaged else "was written by another version of openenvd"
        return f"its run file {path} {why}"

    @property
    def sentence(self) -> str:
        """Return the problem, its effect, and the command that ends the replica."""
        cost = "it goes on, and is neither watched nor restarted"
        end = f"openenv down {self.environment} ends it"
        end = "it ends with the last environment behind it" if self.is_gateway else end
        return f"{self.problem}: {cost}; {end}"

    @property
    def hint(self) -> str:
        """Return what its user can do, at the cost of its sessions."""
        if self.is_gateway:
            return (
                "take down all environments behind the gateway (openenv status), then launch them"
                " again; their sessions end"
            )
        return f"openenv down {self.environment}, then launch it again; its sessions end"


def endpoint_of(run_file: RunFile, status: StatusLine | None = None) -> tuple[str, int]:
    """Return the host and port at which the gateway reaches a replica, by a status or its file."""
    if not run_file.is_local:
        status = status or client.read_status_file(run_file.run_dir) or {}
        host, port = status.get("host"), status.get("port")
        if host and port is not None:
            return host, port
    return run_file.host, run_file.port


def options_variable(data: RunFileData) -> str:
    """Return the name of the variable that contains the options of a replica's server."""
    is_local = (data.get("provider") or LOCAL) == LOCAL
    return HOST_CONFIG_VARIABLE if is_local else HOST_OPTIONS_VARIABLE


def server_options(data: RunFileData) -> Json:
    """Return the options of our server from a run file's variables; another server has none."""
    return dict(json.loads(data.get("env", {}).get(options_variable(data)) or "{}"))


def read(run_dir: Path) -> RunFile | None:
    """Return the replica of a folder; None: there is none, or its run file cannot be used."""
    found = look_at(run_dir)
    return found if isinstance(found, RunFile) else None


def look_at(run_dir: Path, version: int | str = RUN_FILE_VERSION) -> RunFile | SetAside | None:
    """Read the run file of a folder, which must have this `version`; None: there is no file."""
    path = Path(run_dir) / RUN_FILE_NAME
    data = client.read_run_file(run_dir)
    if data is None and (path.exists() or is_locked(path.with_name(LOCK_FILE_NAME))):
        data = client.read_run_file(run_dir) or {}  # it may just have been written
    is_gateways = path.parent.name == GATEWAY  # `gateway/process.py` reads that file
    if data is None or (is_gateways and version == RUN_FILE_VERSION):
        return None
    has_all = all(isinstance(data.get(key), kind) for key, kind in _FIELDS.items())
    if has_all and data.get("version") == version:
        return RunFile.of(path.parent, data)
    by_id = _REPLICA_ID.fullmatch(path.parent.name)
    name: object = data.get("environment")
    if not isinstance(name, str):
        name = by_id[1] if by_id else path.parent.name
    return SetAside(path.parent, name, data.get("version") in (None, version))


def look(
    runs: Path, name: str | None = None, known: Known = None
) -> tuple[list[RunFile], list[SetAside]]:
    """Return the replicas of one environment, or of all, in order; and those with unusable files.

    No `known` run file is read.
    """
    # A replica's id begins with its environment's name, so other folders are not even opened.
    found = [each for each in _look_at_all(runs, "" if name is None else f"{name}-", known) if each]
    own = [each for each in found if name in (None, each.environment)]
    usable = [each for each in own if isinstance(each, RunFile)]
    usable.sort(key=lambda each: (each.environment, each.ordinal, each.replica_id))
    return usable, [each for each in own if isinstance(each, SetAside)]


def all_of(runs: Path) -> list[RunFile]:
    """Return all replicas, sorted by environment and ordinal."""
    return look(runs)[0]


def that_serves(runs: Path, name: str) -> RunFile | None:
    """Return a replica whose address and token clients of an environment use; None: there is none.

    During an update, it is one of those that serve, and not one of their successors.
    """
    return min(of_environment(runs, name), key=by_service, default=None)


def by_service(run_file: RunFile) -> tuple[bool, float]:
    """Return a key that sorts a serving replica first: the newest that is not on standby."""
    return run_file.is_held, -run_file.created_at


def of_environment(runs: Path, name: str, known: Known = None) -> list[RunFile]:
    """Return the replicas of an environment, by ordinal; no `known` run file is read."""
    return look(runs, name, known)[0]


def each_of_environment(runs: Path, name: str) -> Iterator[RunFile]:
    """Yield the replicas of an environment, each read when it is needed."""
    for each in _look_at_all(runs, f"{name}-"):
        if isinstance(each, RunFile) and each.environment == name:
            yield each


def _look_at_all(
    runs: Path, prefix: str, known: Known = None
) -> Iterator[RunFile | SetAside | None]:
    known = known or {}
    with contextlib.suppress(FileNotFoundError):
        names = [entry.name for entry in os.scandir(runs) if entry.name.startswith(prefix)]
        yield from (known.get(name) or look_at(runs / name) for name in sorted(names))


def stop_environment(
    runs: Path,
    name: str,
    grace_seconds: float = GRACE_SECONDS,
    *,
    request_id: str | None = None,
    on_sessions: OnSessions | None = None,
) -> list[str]:
    """Stop all replicas of an environment, or of one launch of it; return their ids. Blocks.

    Raises `EngineFailed` if some could not be stopped, but the others were.
    """
    usable, aside = look(runs, name)
    usable = [each for each in usable if request_id in (None, each.request_id)]
    aside = [each for each in aside if request_id in (None, each.request_id)]
    stop_replicas([each.run_dir for each in usable], grace_seconds, on_sessions)
    for each in aside:
        stop_set_aside(each, grace_seconds)
    return [each.replica_id for each in usable] + [each.replica_id for each in aside]


def stop_replicas(
    run_dirs: Iterable[Path],
    grace_seconds: float = GRACE_SECONDS,
    on_sessions: OnSessions | None = None,
) -> None:
    """Stop replicas side by side, and remove their folders; nothing of them is left running.

    It is no error if one is stopped already. `on_sessions` is called with a replica's id and the
    number of sessions that it still has. Blocks. Raises `EngineFailed` if an engine has not stopped
    some, which keep their folders.
    """
    folders = {Path(run_dir).name: Path(run_dir) for run_dir in run_dirs}
    asked = {name: _ask_to_stop(folder, grace_seconds) for name, folder in folders.items()}
    deadline = time.monotonic() + grace_seconds + _MARGIN_SECONDS

    def tell(replica_id: str, status: StatusLine) -> bool:
        if on_sessions is not None:
            on_sessions(replica_id, status.get("sessions") or 0)
        return False  # only its end is waited for

    left = []
    for name in await_each(asked, deadline, tell):
        run_dir = folders[name]
        # If its agent was killed before the end, the next agent continues.
        while is_left_on_engine(run_dir) and time.monotonic() < deadline:
            link = _ask_to_stop(run_dir, grace_seconds)
            if link is None:
                time.sleep(AGENT_PAUSE_SECONDS)
            list(await_each({name: link}, deadline, tell))
        if is_left_on_engine(run_dir):
            left.append(name)
            continue
        # Also after an orderly end, when nothing in them is alive, and it costs only two reads.
        client.clean_up_after_shim(run_dir)
        _remove(run_dir)
        tell(name, {})
    if left:
        raise EngineFailed(
            f"not stopped yet: {', '.join(sorted(left))}; their engine does not answer, or is slow",
            "they are stopped when it answers again: openenv status shows them",
        )


def stop_set_aside(aside: SetAside, grace_seconds: float = GRACE_SECONDS) -> None:
    """Stop a replica whose run file cannot be used, and remove its folder. Blocks.

    Raises `EngineFailed`, which says what to do, if it is not known to have ended.
    """
    run_dir = aside.run_dir
    socket_path = Layout(run_dir.parent.parent).replica_socket(aside.replica_id)
    with (
        contextlib.suppress(client.ShimGone, TimeoutError, ValueError),  # or another protocol
        client.ShimClient.connect(str(socket_path)) as link,
    ):
        link.send("stop", grace_seconds=grace_seconds)
        link.wait(lambda _: False, grace_seconds + _MARGIN_SECONDS)
    if aside.is_damaged:
        client.clean_up_after_shim(run_dir)
    lock = run_dir / LOCK_FILE_NAME
    has_ended = lock.exists() and not is_locked(lock)
    if not has_ended and not is_stopped(run_dir):
        raise EngineFailed(
            f"{aside.replica_id} cannot be stopped: {aside.problem}, and nothing answers for it",
            f"if an engine runs it: openenv down --strays; else end the process that holds {lock} "
            f"(fuser shows it); then remove the folder {run_dir}",
        )
    socket_path.unlink(missing_ok=True)
    _remove(run_dir)


def revive(run_file: RunFile, fork: client.Fork | None = None) -> None:
    """Start a new shim in place of one that was killed, on the environment's sockets. Blocks.

    The shim is forked by `fork`, if that is possible. Its server accepts connections at once, since
    no replica is started again before its launch has ended. If no other replica can pass the
    sockets on, the address is bound again. A replica on an engine is adopted by an agent instead.
    Raises `OSError` if it cannot be started; EADDRINUSE when another process has its port.
    """
    if not run_file.is_local:
        layout = Layout(run_file.run_dir.parent.parent)
        ask_agent(layout, run_file.engine, "adopt", run_dir=str(run_file.run_dir))
        return
    client.clean_up_after_shim(run_file.run_dir)
    run_file = read(run_file.run_dir) or run_file  # its share of the sessions may have changed
    siblings = each_of_environment(run_file.run_dir.parent, run_file.environment)
    others = (each for each in siblings if each.replica_id != run_file.replica_id)
    listen_fds = listeners_of(others, run_file.port)
    if not listen_fds:
        opened = open_listening_sockets(run_file.host, run_file.port)
        listen_fds = [listener.detach() for listener in opened]
    try:
        data: RunFileData = run_file.data | {"held": False}
        client.start_shim(run_file.run_dir, data, listen_fds=listen_fds, fork=fork)
    finally:
        close_all(listen_fds)


def _remove(run_dir: Path) -> None:
    """Remove a replica's folder; the run file goes last, so that every process finds it till then.

    The status stays as long, since without one an agent would start the replica again.
    """
    with contextlib.suppress(OSError):
        for path in run_dir.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in (RUN_FILE_NAME, STATUS_FILE_NAME):
                path.unlink(missing_ok=True)
        (run_dir / RUN_FILE_NAME).unlink(missing_ok=True)
    shutil.rmtree(run_dir, ignore_errors=True)


def _ask_to_stop(run_dir: Path, grace_seconds: float) -> client.ShimClient | None:
    run_file = read(run_dir)
    if run_file is None:
        return None
    try:
        if is_left_on_engine(run_dir):
            revive(run_file)  # its agent may have been killed
        link = client.ShimClient.connect(run_file.socket_path)
    except OSError:  # the replica or its engine is gone, or no agent can be started: tried again
        return None
    try:
        link.send("stop", grace_seconds=grace_seconds)
    except client.ShimGone:
        link.close()
        return None
    return link


def is_left_on_engine(run_dir: Path) -> bool:
    """Return whether an engine may still have a replica: its agent has not reported its end."""
    run_file = read(run_dir)
    return not (run_file is None or run_file.is_local or is_stopped(run_dir))


def is_stopped(run_dir: Path) -> bool:
    """Return whether a replica's status says that nothing but its folder is left."""
    return (client.read_status_file(run_dir) or {}).get("state") == State.STOPPED


def await_each(
    links: Mapping[str, client.ShimClient | None], deadline: float, on_status: OnStatus
) -> Iterator[str]:
    """Yield each replica when its connection ends, or `on_status` accepts its status. Blocks.

    Replicas without a connection come first; those that are still waited for at the monotonic
    deadline come last. All connections are closed at the end.
    """
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        waiting = {name: stack.enter_context(link) for name, link in links.items() if link}
        for name, link in waiting.items():
            selector.register(link, selectors.EVENT_READ, name)
        yield from links.keys() - waiting.keys()
        while waiting and (seconds := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(seconds):
                with contextlib.suppress(client.ShimGone):  # it has ended
                    try:
                        waiting[key.data].wait(partial(on_status, key.data), 0.0)
                    except TimeoutError:
                        continue
                selector.unregister(key.fileobj)
                del waiting[key.data]
                yield key.data
        yield from waiting


def free_numbers(taken: Iterable[int], count: int) -> list[int]:
    """Return the lowest numbers that are not taken."""
    used = set(taken)
    return list(itertools.islice((n for n in itertools.count() if n not in used), count))


def listeners_of(replicas: Iterable[RunFile], port: int) -> list[int]:
    """Return descriptors of the sockets that listen on a port, from the first shim that has them.

    The caller closes them; there are none if no shim answers. Blocks.
    """
    for replica in replicas:
        if replica.port != port:
            continue
        try:
            with client.ShimClient.connect(replica.socket_path) as link:
                return link.request_listeners()
        except (client.ShimGone, TimeoutError, LookupError):
            continue
    return []
