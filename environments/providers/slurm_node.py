# SPDX-License-Identifier: Apache-2.0
"""What a Slurm job runs on a node that sees no folder of the daemon's machine.

    agent ◀──the token, from the job's environment── job
          ──plan, files──▶ this node's own openenvd makes a program of them (`prepared_there.py`)
          ◀──output, address, heartbeat, exit──  and is the job that serves it (`slurm_job.py`)

The node needs openenvd of the daemon's version; projects and their virtual environments are made in
openenvd's home there, once for each version of their files.

Failure cases

    the agent does not answer, or     the job ends, with a line that nobody sees but Slurm's log;
    knows no such job                 the daemon says that the job has not been heard of
    what is launched cannot be made   its reason is in the log, and the job ends with code 1
    ready, or the disk is full
    it is told to end or to drain     it ends, and leaves nothing
    before it serves
    a job is killed                   the files that it ran in are locked no more: the next job of
                                      this home on the node, of other files, removes them
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

from ...env_host.protocol import HOST_CONFIG_VARIABLE
from ...system.json_lines import Json
from ..engines.slurm_job import Job, end_as
from ..engines.slurm_login import copies, home_there
from ..engines.slurm_options import TOKEN_VARIABLE, URL_VARIABLE
from ..engines.slurm_posting import FAILURES, AgentAddress, PostedReports
from ..errors import EnvironmentsError
from ..layout import make_private
from .prepared_there import prepare_here, variables_here

LOCK_FILE_NAME = ".lock"  # beside the files of one version, or of one job
FOLDER_PREFIX = "openenvd-job-"  # of a job's own, among temporary files


def prepared(plan: Json, agent: AgentAddress) -> Json:
    """Return a replica's plan with the program that serves it on this node.

    Raises:
        EnvironmentsError, OSError: It cannot be made ready here.
    """
    what = plan["source"]
    with tempfile.TemporaryFile() as files:

        def take(message: Json) -> None:
            if message.get("wants_files"):
                with agent.open("/files") as archive:
                    shutil.copyfileobj(archive, files)
                files.seek(0)
            else:
                sys.stderr.write(f"{message['say']}\n")

        program = prepare_here(what, files, take)
    config = json.dumps(program.config.to_json())
    return plan | {
        "command": list(program.argv),
        "folder": str(program.folder),
        "links": {name: str(target) for name, target in program.links.items()},
        "env": {**variables_here(what["spec"]["env"]), **plan["env"], HOST_CONFIG_VARIABLE: config},
    }


@contextmanager
def keeping(folder: Path, others: str = "*") -> Iterator[None]:
    """Keep the files of one version for as long as a job runs in them; remove those of no job.

    Args:
        folder: Where they are, or will be; versions are beside each other.
        others: What these are called, as a pattern.
    """
    descriptor = _lock(folder)
    try:
        for other in folder.parent.glob(others):
            _remove_unused(other)
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    """Hold the lock of a folder, which is made if need be: a file's, as nodes may share it."""
    path = folder / LOCK_FILE_NAME
    while True:
        make_private(folder)
        try:
            descriptor = _open(path)
        except FileNotFoundError:  # another job has just removed it
            continue
        with contextlib.suppress(OSError):  # no locks there: nobody removes anything, either
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_there(descriptor, path):
            return descriptor
        os.close(descriptor)


def _remove_unused(folder: Path) -> None:
    path = folder / LOCK_FILE_NAME
    with contextlib.suppress(OSError):  # a job runs there; another one removes it, too
        if folder.lstat().st_uid != os.getuid():
            return
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(descriptor, path):  # a job that begins meanwhile makes them anew
                unused = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
                shutil.rmtree(folder.rename(unused), ignore_errors=True)
        finally:
            os.close(descriptor)


def _is_there(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _kept(plan: Json) -> AbstractContextManager[None]:
    what = plan["source"]
    if what["folder"] is None:  # a bundled one has no files of its own
        return contextlib.nullcontext()
    return keeping(copies(home_there(), what["home"]) / str(what["digest"]))


def _serve(agent: AgentAddress) -> int:
    with (
        tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder,
        keeping(Path(folder), f"{FOLDER_PREFIX}*"),
    ):
        reports = PostedReports(agent, Path(folder))
        plan = reports.begin()
        try:
            with _kept(plan):
                reports.plan = prepared(plan, agent)
                return Job(reports).run()
        except (EnvironmentsError, *FAILURES) as exc:
            hint = getattr(exc, "hint", None)
            sys.stderr.write(f"{exc}\n" + (f"{hint}\n" if hint else ""))
            return 1
        finally:
            sys.stderr.flush()
            reports.close()


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    """Be a job; ends by the signal that has ended its server."""
    os.umask(0o077)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # until there is a server, which gets them
        signal.signal(number, _end)
    url, token = os.environ.pop(URL_VARIABLE), os.environ.pop(TOKEN_VARIABLE)
    agent = AgentAddress(url, token, os.environ["SLURM_JOB_ID"])
    try:
        return end_as(_serve(agent))
    except FAILURES as exc:
        sys.stderr.write(f"{agent.url} does not tell this job what to do: {exc}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
