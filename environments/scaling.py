# SPDX-License-Identifier: Apache-2.0
"""More or fewer replicas of an environment that runs, as its run files know it.

    replicas_of ─┬─ too few:  provider.add ──▶ marked run files ──ready──▶ keep ──▶ the daemon's
                 └─ too many: drain ──▶ their shims, which end with the last session

A replica that is being added is marked in its run file with the request that adds it: the daemon
leaves it alone until it is kept, and stops it when the request has ended without that. One that is
drained is the daemon's to remove. All of it can be repeated, and blocks.

    the worker is killed      its next attempt, or the daemon, stops what is marked; what was kept
                              says what it is in place of, and the daemon drains that
    a shim is killed          `drain` stops what is left: its sessions are lost already
    an agent is killed        another one drains: the sessions are the instance's, and go on
    the environment goes down everything that has a run file is stopped, marked or not
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

from ..schema.errors import NotReady
from ..system.process.descriptors import Message, send_message
from ..system.text.json_lines import Json
from . import run_files
from .engines.new_replicas import with_options
from .run_files import OnSessions, RunFile
from .shim.client import ShimClient, ShimGone, read_status_file
from .shim.files import RUN_FILE_NAME, write_json


def replicas_of(runs: Path, name: str) -> list[RunFile]:
    """The replicas that an environment is to have, the oldest first.

    Not those being drained, nor those of an earlier generation that are not asked to drain yet.
    """
    found = [run_file for run_file in run_files.of_environment(runs, name) if _stays(run_file)]
    serving = min(found, key=run_files.by_service, default=None)
    own = [each for each in found if serving and each.request_id == serving.request_id]
    return sorted(own, key=lambda run_file: (run_file.created_at, run_file.ordinal))


def stop_added_by(runs: Path, name: str, request_id: str) -> list[str]:
    """Stop what a request has started and not kept; returns the ids."""
    found = run_files.of_environment(runs, name)
    marked = [run_file for run_file in found if run_file.data.get("added_by") == request_id]
    run_files.stop_replicas(run_file.run_dir for run_file in marked)
    return [run_file.replica_id for run_file in marked]


def keep(run_dirs: Iterable[Path], in_place_of: Iterable[Json] = ()) -> None:
    """Leave replicas that are ready to the daemon; also what each of them is in place of."""
    for run_dir, replaced in zip_longest(run_dirs, in_place_of):
        if (run_file := run_files.read(run_dir)) is not None:
            data = run_file.data.copy()
            data.pop("added_by", None)
            if replaced is not None:
                data["in_place_of"] = replaced
            write_json(str(run_dir / RUN_FILE_NAME), data, sync=True)


def drain(run_file: RunFile, timeout_seconds: float) -> None:
    """Have a replica end with its last session; at once when its shim does not answer."""
    while True:
        try:
            with ShimClient.connect(run_file.socket_path) as link:
                link.send("drain", timeout_seconds=timeout_seconds)
                link.wait(lambda status: bool(status.get("is_draining")), timeout_seconds + 1.0)
            return
        except ShimGone:
            if not run_files.goes_on(run_file):
                if not run_files.is_stopped(run_file.run_dir):
                    run_files.stop_replica(run_file.run_dir)
                return
        except TimeoutError:
            return


def wait_until_gone(
    replicas: Iterable[RunFile], timeout_seconds: float, on_sessions: OnSessions | None = None
) -> None:
    """Wait until replicas that are being drained have ended; tell of the sessions that are left.

    Raises:
        NotReady: One has not in this time.
        EngineFailed: Its engine cannot be asked.
    """
    deadline = time.monotonic() + timeout_seconds
    tell = run_files.telling(on_sessions)
    waiting = {run_file.replica_id: run_file for run_file in replicas}
    while waiting:
        links = run_files.links_to(waiting.values())
        for name in run_files.await_each(links, deadline, tell):
            link = links[name]
            if link is not None and not link.has_ended:
                raise NotReady(
                    f"{name} has not ended yet: its engine does not answer, or is slow",
                    "it ends when it does; restart the others then",
                )
            if not run_files.goes_on(waiting[name]):
                del waiting[name]
                tell(name, {})


def share_out(staying: Iterable[RunFile], shares: Iterable[int | None], replicas: int) -> None:
    """Give running replicas another share of the sessions, now and after a restart.

    Sessions beyond it go on. What runs on an engine cannot be told: it has it after a restart.
    """
    for run_file, share in zip(staying, shares, strict=True):
        data = with_options(run_file.data, max_sessions=share)
        data["spec"] = data.get("spec", {}) | {"replicas": replicas}
        write_json(str(run_file.run_dir / RUN_FILE_NAME), data, sync=True)
        if share is not None and run_file.is_local:
            _tell_share(run_file, share)


def _tell_share(run_file: RunFile, share: int) -> None:
    """Tell the env host; one that does not run, or counts no sessions, reads it when it starts."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.setblocking(False)
        end.connect(run_file.data["door_path"])
        send_message(end, Message({"max_sessions": share}))


def _stays(run_file: RunFile) -> bool:
    """Whether it is not being drained or stopped, nor left by a request that has not kept it."""
    status = read_status_file(run_file.run_dir)
    if status is None:  # its shim has not begun; or its folder is removed, the run file first
        return (run_file.run_dir / RUN_FILE_NAME).exists() and "added_by" not in run_file.data
    is_ending = status.get("is_draining") or status.get("state") in ("stopping", "stopped")
    return not is_ending and "added_by" not in run_file.data
