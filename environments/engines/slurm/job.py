# SPDX-License-Identifier: Apache-2.0
"""The program of a Slurm job on its node, and the files by which it and the engine talk.

`python -m …engines.slurm.job FOLDER`:

    job ──starts──▶ env host          its sockets are opened here, before their address is written
     └──▶ FOLDER/slurm-JOB.json       address, heartbeat, exit

The job listens at the node's address, as Slurm has it, and at the port of the replica's plan, or at
another one if that is taken. It passes SIGTERM, and SIGUSR1 to drain, on to its server, and ends
with the exit code or signal of its server, so that Slurm knows how it ended.

Failure cases

    the folder cannot be written     the job continues; the next heartbeat is another attempt
    the replica has another job      this job ends: its node was cut off, say, and is back
    this process is killed           Slurm ends the rest of the job
    the server is killed             the job ends by the same signal, which the report has, too; the
                                     counters of the job's cgroup tell why (`server_exit.py`)

Files in the replica's folder, which the engine and the job see:

    slurm.json          by the engine: the job that the replica has, and the jobs that it abandoned
                        on nodes that did not answer. A job that has ended and is not there was
                        removed. A running job that finds another one there ends
    slurm-JOB.json      by the job: its address, heartbeat and exit; always a whole file
    slurm-JOB.out       the output of the job
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ....schema.protocol import LISTEN_FD_VARIABLE, NOTIFY_FD_VARIABLE
from ....system.memory.cgroups import own_group
from ....system.net.listening_sockets import descriptors_text, http_address
from ....system.process.proc import printed_by
from ....system.process.signal_pipe import SignalPipe
from ....system.text.json_lines import Json
from ....system.text.units import MB
from ...shim.files import read_json, read_run_file, write_json
from ...shim.server_exit import ExitEvidence
from ...shim.server_process import NotifyPipe
from ..base import ReplicaPlan
from ..host_options import listen, server_variables

HEARTBEAT_SECONDS = 5.0  # between two reports of a job
JOB_FILE_NAME = "slurm.json"
NO_JOB = ""  # in place of a job's id, while a job that Slurm does not know is to end
OUTPUT_FILE_NAME = "slurm-{job}.out"


def report_name(job: str) -> str:
    """Return the name of a job's report."""
    return f"slurm-{job}.json"


@dataclass
class JobReport:
    """The report of a job about itself."""

    job: str  # its id
    node: str  # the node that it runs on
    host: str  # the address of that node
    port: int  # the port that its server listens on there
    pid: int | None = None  # of its server, on that node
    heartbeats: int = 0  # a counter, since clocks of nodes may differ
    exit_code: int | None = None  # of the server, 128 + n for a signal; None: it has not ended
    exit: dict[str, Any] | None = None  # the `ExitReason` of the server

    @property
    def address(self) -> str:
        """Return the URL of its server."""
        return http_address(self.host, self.port)

    def write(self, run_dir: Path) -> None:
        """Replace the earlier report; raises `OSError` when that fails."""
        write_json(str(run_dir / report_name(self.job)), asdict(self))


def read_report(run_dir: Path, job: str) -> JobReport | None:
    """Return the report of a job; None when there is none yet, or it cannot be read."""
    try:
        written = dict(json.loads((run_dir / report_name(job)).read_bytes()))
        written.pop("runs", None)  # which jobs of 0.2.0 report
        return JobReport(**written)
    except (OSError, ValueError, TypeError):
        return None


def read_job(run_dir: Path) -> str | None:
    """Return the job of a replica; None when it has none, or that cannot be read."""
    return _read(run_dir)[0]


def left_jobs(run_dir: Path) -> list[str]:
    """Return the jobs that a replica has abandoned on nodes that did not answer."""
    return _read(run_dir)[1]


def is_replaced(run_dir: Path, job: str) -> bool:
    """Return whether a replica certainly has another job; if its folder is gone, it may not."""
    return read_job(run_dir) not in (None, job)


def write_job(run_dir: Path, job: str) -> None:
    """Record which job a replica has; raises `OSError` when that fails."""
    _write(run_dir, job, left_jobs(run_dir))


def leave_job(run_dir: Path, job: str) -> None:
    """Record that a replica has abandoned a job, which ends when it sees that; raises `OSError`."""
    _write(run_dir, NO_JOB, [*dict.fromkeys([*left_jobs(run_dir), job])])


def forget_job(run_dir: Path, job: str) -> None:
    """Remove everything that was written about a job, except that it was abandoned."""
    names = [report_name(job), OUTPUT_FILE_NAME.format(job=job)]
    has, left = _read(run_dir)
    if not left and has in (job, NO_JOB):
        names.append(JOB_FILE_NAME)
    elif has == job:
        with contextlib.suppress(OSError):
            _write(run_dir, NO_JOB, left)
    for name in names:
        with contextlib.suppress(OSError):
            (run_dir / name).unlink()


def _read(run_dir: Path) -> tuple[str | None, list[str]]:
    data = read_json(run_dir / JOB_FILE_NAME) or {}
    return data.get("job"), list(data.get("left", ()))


def _write(run_dir: Path, job: str, left: list[str]) -> None:
    write_json(str(run_dir / JOB_FILE_NAME), {"job": job, "left": left}, sync=True)


REPLACED_SECONDS = 5.0  # for the server to end after its job was replaced
ASK_SECONDS = 10.0  # for Slurm to answer with the address of this node
# Variables that Slurm sets for a job: its resources, its GPUs among them.
_OF_JOB = ("SLURM_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_", "GPU_DEVICE_ORDINAL", "TMPDIR")
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def node_address(environ: Mapping[str, str]) -> str:
    """Return this node's address, as Slurm has it, or else the node's own name."""
    name = environ.get("SLURMD_NODENAME", "")
    printed = printed_by(["scontrol", "--oneliner", "show", "node", name], ASK_SECONDS)
    return read_fields(printed).get("NodeAddr") or socket.gethostname()


def read_fields(printed: str) -> dict[str, str]:
    """Return the fields that `scontrol --oneliner` prints; the first of several values counts."""
    fields: dict[str, str] = {}
    for word in printed.split():
        name, equals, value = word.partition("=")
        if equals:
            fields.setdefault(name, value)
    return fields


def server_environment(
    plan: Json, host: str, folder: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the env host; those of the job are `inherited`."""
    megabytes = _number(inherited.get("SLURM_MEM_PER_NODE"))
    cores = _number(inherited.get("SLURM_CPUS_ON_NODE"))
    limits = {"memory_bytes": megabytes * MB, "cores": cores}
    options = server_variables(plan, host, folder, owns_cgroup=True, **limits)
    of_job = {name: text for name, text in inherited.items() if name.startswith(_OF_JOB)}
    return {**plan["env"], **of_job, **options}


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


class Job:
    """One job: its server, and the report in the replica's folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._plan = ReplicaPlan.of(read_run_file(str(run_dir))).to_json()
        self._signals = SignalPipe((*_PASSED_ON, signal.SIGCHLD), ignored=(signal.SIGHUP,))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals, selectors.EVENT_READ, lambda: None)
        self._notify = NotifyPipe(self._selector, self._note_children)
        self._evidence = ExitEvidence(self._plan.get("memory_bytes"))
        host = node_address(os.environ)
        self._listeners = listen(host, int(self._plan["port"]))
        self._report = JobReport(
            job=os.environ["SLURM_JOB_ID"],
            node=os.environ.get("SLURMD_NODENAME", host),
            host=host,
            port=int(self._listeners[0].getsockname()[1]),
        )

    def run(self) -> int:
        """Wait until the server has ended; return its exit code, 128 + n for a signal."""
        self._evidence.begin(own_group(is_ours=False))
        server = self._start()
        self._report.pid = server.pid
        heartbeat_at = 0.0
        while server.poll() is None:
            if time.monotonic() >= heartbeat_at:
                heartbeat_at = time.monotonic() + HEARTBEAT_SECONDS
                self._send_heartbeat(server)
                self._evidence.look()
            for key, _ in self._selector.select(max(0.0, heartbeat_at - time.monotonic())):
                key.data()
            for number in self._signals.take() - {signal.SIGCHLD}:
                server.send_signal(number)
        self._note_children()
        code = server.returncode
        self._report.exit_code = exit_code = code if code >= 0 else 128 - code
        status = code << 8 if code >= 0 else -code
        self._report.exit = self._evidence.explain(
            server.pid, (status, None), stopped_by_us=False, failed=None
        )
        self._write_report()
        return exit_code

    def _note_children(self) -> None:
        """Count kills for memory that the server reports of its children as theirs."""
        for message in self._notify.messages():
            if "shard_exit" in message:
                self._evidence.note_child(message["shard_exit"])

    def _write_report(self) -> None:
        """Write the report, if the disk is not full and the file server answers."""
        with contextlib.suppress(OSError):
            self._report.write(self._run_dir)

    def _send_heartbeat(self, server: subprocess.Popen[bytes]) -> None:
        """Report that this job lives; end the server if the replica has another job."""
        self._report.heartbeats += 1
        self._write_report()
        if is_replaced(self._run_dir, self._report.job):
            sys.stderr.write("This replica has another job by now: ending.\n")
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(REPLACED_SECONDS)
            server.kill()
            server.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        plan = self._plan
        environ = server_environment(plan, self._report.host, self._run_dir, os.environ)
        fds = [one.fileno() for one in self._listeners]
        environ[LISTEN_FD_VARIABLE] = descriptors_text(fds)
        reading, writing = os.pipe()
        environ[NOTIFY_FD_VARIABLE] = str(writing)
        server = subprocess.Popen(
            plan["command"],
            env=environ,
            cwd=plan["folder"],
            stdin=subprocess.DEVNULL,
            pass_fds=[*fds, writing],
        )
        os.close(writing)
        self._notify.watch(reading)
        for one in self._listeners:  # only the server keeps them: clients notice its end
            one.close()
        return server


def main(run_dir: Path) -> int:
    """Run a job; return the exit code of its server, 128 + n for a signal."""
    os.umask(0o077)
    return Job(run_dir).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
