# SPDX-License-Identifier: Apache-2.0
"""Branches and checkpoints of sessions: their time and memory, beside a bare fork and a replay.

    python -m load_tests.branching [--short] [--json FILE]

One env host serves a counter that is plain data (tier `copy`), another one, with a process for each
session, a counter that only a fork copies, with 50 or 250 MB beside it. A client asks for a branch,
attaches to it and steps; the limit is a process of the same size that forks and writes a byte. The
peer of a copy is `reset` and a replay of 50 steps. Memory is that which a process shares with no
other (USS), of a branch that has answered one step, and of a parked checkpoint.

Aims: `fork` of 50 MB 5 ms P50 and 20 ms P99, of 250 MB 15 ms; `copy` 1 ms; 1,000 branches in 0.5 s
(`copy`) and 5 s (`fork`); 1 MB for a parked checkpoint; the next step of a parent of 100 branches
at most 20 ms later; nothing left by 10,000 branches in a row.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from websockets.sync.client import ClientConnection, connect

from load_tests.shared.report import MEGABYTE, Report, parse_arguments, percentile
from openenvd.schema import protocol

PROGRAM = Path(__file__).resolve().parents[1] / "env_host" / "__main__.py"
MODULE = """
import os, threading
from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

class Do(Action):
    by: int = 1

class Seen(Observation):
    at: int = 0
    pid: int = 0

class Plain(Environment[Do, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    BRANCH = "copy"

    def __init__(self):
        self.at = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.at = 0
        return Seen()

    def step(self, action, timeout_s=None, **kwargs):
        self.at += action.by
        return Seen(at=self.at, pid=os.getpid())

    @property
    def state(self):
        return State(step_count=self.at)

class Forked(Plain):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.ballast = b"x" * (int(os.environ["BALLAST_MB"]) << 20)
"""
REPLAYED = 50  # steps
BRANCHES = 1000
SIBLINGS = 100


class Session:
    """A session over a raw WebSocket."""

    def __init__(self, port: int, stack: ExitStack, session_id: str = "") -> None:
        path = f"/ws?session_id={session_id}" if session_id else "/ws"
        opened = connect(f"ws://127.0.0.1:{port}{path}", max_size=None)
        self.connection: ClientConnection = stack.enter_context(opened)

    def ask(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        self.connection.send(json.dumps({"type": kind, "data": data or {}}))
        answer: dict[str, Any] = json.loads(self.connection.recv())
        assert answer["type"] != "error", answer
        return dict(answer["data"])

    def branch(self, **data: Any) -> list[str]:
        return [each["session_id"] for each in self.ask("branch", data)["branches"]]

    def pid(self) -> int:
        return int(self.ask("step", {})["observation"]["pid"])


@contextmanager
def host(name: str, ballast_mb: int = 0, **options: Any) -> Iterator[int]:
    """Serve a class of the module above; yields the port."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "counters.py").write_text(MODULE)
        config = protocol.HostConfig(
            name="load", env_class=f"counters:{name}", import_paths=(folder,), shards=1, **options
        )
        reading, writing = os.pipe()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
            fds = {
                protocol.LISTEN_FD_VARIABLE: listener.fileno(),
                protocol.NOTIFY_FD_VARIABLE: writing,
            }
            told = {protocol.HOST_CONFIG_VARIABLE: json.dumps(config.to_json())}
            environ = {**os.environ, **told, **{n: str(fd) for n, fd in fds.items()}}
            environ["BALLAST_MB"] = str(ballast_mb)
            command = [sys.executable, "-P", str(PROGRAM)]
            process = subprocess.Popen(command, env=environ, pass_fds=tuple(fds.values()))
        os.close(writing)
        try:
            with open(reading, encoding="utf-8") as notes:
                next(line for line in notes if json.loads(line).get("ready"))
                yield port
        finally:
            process.terminate()
            process.wait()


def first_answers(port: int, times: int, **data: Any) -> list[float]:
    """Return the milliseconds from each request for a branch to the branch's first answer."""
    found = []
    with ExitStack() as stack:
        parent = Session(port, stack)
        parent.ask("reset")
        parent.branch()
        for _ in range(times):
            with ExitStack() as inner:
                began = time.perf_counter()
                Session(port, inner, *parent.branch(**data)).pid()
                found.append((time.perf_counter() - began) * 1e3)
    return found


def bare_forks(size_mb: int, times: int) -> list[float]:
    """Return the milliseconds from a fork to the child's first byte, in a process of that size."""
    code = (
        "import gc,os,sys,time\n"
        f"ballast, found = b'x' * ({size_mb} << 20), []\n"
        "gc.freeze()\n"
        f"for _ in range({times}):\n"
        "    r, w = os.pipe()\n"
        "    began = time.perf_counter()\n"
        "    if not (pid := os.fork()):\n"
        "        os.write(w, b'x'); os._exit(0)\n"
        "    os.read(r, 1); found.append((time.perf_counter() - began) * 1e3)\n"
        "    os.waitpid(pid, 0); os.close(r); os.close(w)\n"
        "print(*found)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    return [float(word) for word in output.split()]


def forked(report: Report, size_mb: int, times: int) -> None:
    with host("Forked", size_mb, isolate=True, max_sessions=4) as port:
        found = first_answers(port, times)
    limit = statistics.median(bare_forks(size_mb, times))
    name = f"fork, parent of {size_mb} MB: branch to first answer"
    report.append(f"{name}, P50", "ms", statistics.median(found))
    report.append(f"{name}, P99", "ms", percentile(found, 0.99))
    report.append(f"  limit: a bare fork of {size_mb} MB, P50", "ms", limit)


def copied(report: Report, times: int) -> None:
    with host("Plain", max_sessions=BRANCHES + 8) as port, ExitStack() as stack:
        report.append("copy: branch to first answer, P50", "ms",
                      statistics.median(first_answers(port, times)))  # fmt: skip
        parent = Session(port, stack)
        parent.ask("reset")
        asked = [timed(lambda: parent.branch(ttl_s=0.1)) for _ in range(times)]
        report.append("copy: a branch, P50", "ms", statistics.median(asked))
        replays = [timed(lambda: replay(port)) for _ in range(times)]
        report.append(f"  peer: reset and replay of {REPLAYED} steps, P50", "ms",
                      statistics.median(replays))  # fmt: skip
        shard = psutil.Process(parent.pid())
        before = shard.memory_full_info().uss
        report.append(f"copy: {BRANCHES} branches", "ms",
                      timed(lambda: parent.branch(count=BRANCHES)))  # fmt: skip
        more = shard.memory_full_info().uss - before
        report.append(f"copy: memory of {BRANCHES} branches", "MB", more / MEGABYTE)


def replay(port: int) -> None:
    with ExitStack() as stack:
        session = Session(port, stack)
        session.ask("reset")
        for _ in range(REPLAYED):
            session.ask("step", {})


def timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def many(report: Report, count: int) -> None:
    with host("Forked", 1, isolate=True, max_sessions=count + 4) as port, ExitStack() as stack:
        parent = Session(port, stack)
        parent.ask("reset")
        usual = statistics.median(timed(parent.pid) for _ in range(50))
        ids = parent.branch(count=SIBLINGS)
        later = timed(parent.pid) - usual
        report.append(f"fork: the parent's step after {SIBLINGS} branches is later by", "ms", later)
        idle = [Session(port, stack, each) for each in ids[:8]]
        used = [psutil.Process(each.pid()).memory_full_info().uss for each in idle]
        report.append("fork: a branch after one step", "MB", statistics.median(used) / MEGABYTE)
        holder = psutil.Process(parent.pid()).parent()
        assert holder is not None
        before = {each.pid for each in holder.children(recursive=True)}
        parent.ask("checkpoint")
        [parked] = [e for e in holder.children(recursive=True) if e.pid not in before]
        report.append("fork: a parked checkpoint", "MB", parked.memory_full_info().uss / MEGABYTE)
        switches = parked.num_ctx_switches()
        time.sleep(1.0)
        woken = sum(parked.num_ctx_switches()) - sum(switches)
        report.append("fork: wake-ups of a parked checkpoint in a second", "", woken)
        rest = count - SIBLINGS
        report.append(f"fork: {rest} branches", "ms", timed(lambda: parent.branch(count=rest)))


def in_a_row(report: Report, count: int) -> None:
    """Make, use and end branches one after another; what the last nine tenths leave is growth."""
    with host("Forked", 1, isolate=True, max_sessions=4) as port, ExitStack() as stack:
        parent = Session(port, stack)
        parent.ask("reset")
        shard = psutil.Process(parent.pid()).parent()
        assert shard is not None
        group = [shard, *shard.children(recursive=True)]

        def held() -> tuple[int, int, int]:
            living = [
                each for each in (shard, *shard.children(recursive=True)) if each.is_running()
            ]
            kept = [each for each in group if each.is_running()]
            return (
                len(living),
                sum(each.num_fds() for each in kept),
                sum(each.memory_full_info().uss for each in kept),
            )

        for number in range(count):
            if number == count // 10:
                before = held()
            with ExitStack() as inner:
                Session(port, inner, *parent.branch()).pid()
        time.sleep(1.0)
        processes, descriptors, used = (a - b for a, b in zip(held(), before, strict=True))
        report.append(f"fork: processes more after {count} branches in a row", "", processes)
        report.append("fork: descriptors more", "", descriptors)
        report.append("fork: memory more", "MB", used / MEGABYTE)


def main() -> None:
    more = {"short": {"action": "store_true", "help": "fewer branches"}}
    given = parse_arguments(__doc__.splitlines()[0], 3, **more)
    report = Report("Branches of sessions")
    for _ in range(given.repetitions):
        copied(report, 10 if given.short else 100)
        many(report, 2 * SIBLINGS if given.short else BRANCHES)
        for size_mb in (50,) if given.short else (50, 250):
            forked(report, size_mb, 10 if given.short else 100)
    in_a_row(report, 100 if given.short else 10_000)
    report.finish(given.json)


if __name__ == "__main__":
    main()
