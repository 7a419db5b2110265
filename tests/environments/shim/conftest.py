# SPDX-License-Identifier: Apache-2.0
"""Real shims, real servers (small programs that follow commands), real cgroups.

The test process is a subreaper, so that whatever a test loses becomes its child: every test ends
with the assertion that there is none.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from openenvd.environments.run_files import RUN_FILE_VERSION
from openenvd.environments.shim import client
from openenvd.executor.spawning.source import ZygoteClient
from openenvd.system.memory.cgroups import CgroupManager
from openenvd.system.process.prctl import adopt_orphans
from openenvd.system.process.proc import children_of

WAIT_SECONDS = 30.0
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="shims are forked on Linux alone")

# The servers of these tests: each reports that it is ready, then does what it reads.
SERVER = """
import json, os, select, signal, sys, time
notify = int(os.environ["OPENENVD_NOTIFY_FD"])
def report(**message):
    os.write(notify, json.dumps(message).encode() + b"\\n")
commands = os.open(sys.argv[1], os.O_RDWR)
# A signal that comes just before `read` does not end it, and its handler would never run.
woken, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)
def lines():
    while True:
        if commands in select.select([commands, woken], [], [])[0]:
            yield from os.read(commands, 65536).decode().splitlines()
        else:
            os.read(woken, 1)
signal.signal(signal.SIGUSR1, lambda *_: report(sessions=41, draining=True))
print("server", os.getpid(), flush=True)
if sys.argv[2:] == ["fail"]:
    print("ImportError: no such thing", flush=True)
    report(failed="ImportError: no such thing")
    sys.exit(3)
report(ready=True, max_sessions=4)
for line in lines():
    order, *words = line.split()
    if order == "exit":
        if words[1:]:
            report(stopped_by=int(words[1]))
        sys.exit(int(words[0]))
    elif order == "sleep":
        report(sleeps=True)
        sys.exit(int(words[0]))
    elif order == "sessions":
        report(sessions=int(words[0]))
    elif order == "print":
        print(*words, flush=True)
    elif order == "show":
        print(words[0], os.environ.get(words[0]), flush=True)
    elif order == "gate":
        is_open = select.select([int(os.environ["OPENENVD_GATE_FD"])], [], [], 0)[0]
        report(sessions=2 if is_open else 1)
    elif order == "ignore_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report(sessions=99)
    elif order == "eat":
        block = bytearray(b"x") * (int(words[0]) << 20)
    elif order == "child_eats":
        if os.fork() == 0:
            block = bytearray(b"x") * (int(words[0]) << 20)
            os._exit(0)
        _, status = os.wait()
        report(sessions=os.waitstatus_to_exitcode(status))
    elif order == "lose_capped":
        report(shard_exit={"pid": 5, "wait_status": 9, "isolated": True,
                        "out_of_memory": "was killed for memory", "reason":
                        {"kind": "oom_killed", "detector": "watchdog", "limit_bytes": 1 << 20}})
    elif order == "orphan":
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(writing, str(os.getpid()).encode())
                time.sleep(3600)
            os._exit(0)
        os.wait()
        report(sessions=int(os.read(reading, 20)))
"""


# The same as a function to be called in a process that was forked, and one that looks round there.
FORKED = """
import json, os, random, signal, sys, time
SERVER = {!r}
HELD = b"x" * (16 << 20)
def main():
    sys.argv = ["-c", *sys.orig_argv[5:]]
    exec(SERVER, {{"__name__": "kept"}})
def look_round():
    defaults = signal.SIG_DFL, signal.default_int_handler
    private = sum(
        int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if "Private_" in line
    )
    paths = {{fd: f"/proc/self/fd/{{fd}}" for fd in os.listdir("/proc/self/fd")}}
    found = {{
        "cwd": os.getcwd(),
        "fds": {{fd: os.readlink(path) for fd, path in paths.items() if os.path.lexists(path)}},
        "signals": [int(n) for n in (1, 2, 3, 15, 17) if signal.getsignal(n) not in defaults],
        "mask": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "random": random.random(),
        "private_kb": private,
    }}
    line = json.dumps({{"ready": True, "max_sessions": 4, **found}}).encode() + b"\\n"
    os.write(int(os.environ["OPENENVD_NOTIFY_FD"]), line)
    time.sleep(3600)
"""


class Zygote:
    """A zygote that has imported the tests' servers, as the daemon's has its own."""

    pids: ClassVar[set[int]] = set()
    may_be_lost = False

    def __init__(self, folder: Path, preload: str = "server_program") -> None:
        (folder / "server_program.py").write_text(FORKED.format(SERVER))
        self.env = {"PATH": os.environ["PATH"], "SECRET": "xyz", **client.read_at_start(os.environ)}
        self._pipe = os.pipe()  # its end kills workers
        self._client = ZygoteClient.start(
            death_pipe=self._pipe[0], home=str(folder), preload=[preload]
        )
        self.pids.add(self._client.pid)
        self.process = psutil.Process(self._client.pid)

    def changes(self) -> dict[str, Any]:
        return {"entry": "server_program:main", "env": dict(self.env), "fork": self.fork}

    def fork(self, entry: str, payload: dict[str, Any], fds: Sequence[int]) -> bool:
        is_forked = self._client.fork(entry, payload, fds, WAIT_SECONDS)
        assert is_forked or self.may_be_lost
        return is_forked

    def close(self) -> None:
        self.pids.remove(self._client.pid)
        self._client.close(WAIT_SECONDS)
        for end in self._pipe:
            os.close(end)


class Replica:
    """One kept server, and a link to its shim."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        folder.mkdir(parents=True)
        self.run_dir = folder / "run"
        self.commands = folder / "commands"
        os.mkfifo(self.commands)
        words = changes.pop("words", [])
        self.fork = changes.pop("fork", None)
        self.listen_fds = changes.pop("listen_fds", ())
        self.run_file: Any = {
            "version": RUN_FILE_VERSION,
            "replica_id": f"echo-0-{uuid.uuid4().hex[:8]}",
            "environment": "echo",
            "ordinal": 0,
            "number": 0,
            "request_id": "0" * 16,
            "argv": [sys.executable, "-I", "-S", "-c", SERVER, str(self.commands), *words],
            "env": {"PATH": os.environ["PATH"], "SECRET": "xyz"},
            "cwd": str(folder),
            "log_path": str(folder / "replica.log"),
            "socket_path": str(folder / "k.sock"),
            "host": "127.0.0.1",
            "port": 0,
            "memory_limit_bytes": None,
            "max_log_bytes": 1 << 20,
            "oom_score_adj": 500,
            "created_at": 0.0,
        } | changes
        self._link: client.ShimClient | None = None

    def start(self) -> Replica:
        client.start_shim(self.run_dir, self.run_file, listen_fds=self.listen_fds, fork=self.fork)
        return self

    def again(self) -> Replica:
        assert self._link is not None
        self._link.close()
        self._link = None
        return self.ready()

    @property
    def link(self) -> client.ShimClient:
        if self._link is None:
            self._link = self.connect()
        return self._link

    def connect(self) -> client.ShimClient:
        return client.ShimClient.connect(self.run_file["socket_path"], WAIT_SECONDS)

    def tell(self, order: str) -> None:
        fd = os.open(self.commands, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(fd, True)  # there is a reader, or the line above had raised
        os.write(fd, order.encode() + b"\n")
        os.close(fd)

    def wait_state(self, state: str, generation: int | None = None) -> dict[str, Any]:
        return self.wait(lambda s: s["state"] == state and generation in (None, s["generation"]))

    def wait(self, predicate: Callable[[Any], bool]) -> dict[str, Any]:
        return dict(self.link.wait(predicate, WAIT_SECONDS))

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.link.status)

    def ready(self) -> Replica:
        self.start().wait_state("ready")
        return self

    def log(self) -> str:
        return Path(self.run_file["log_path"]).read_text()

    def wait_for_end(self) -> None:
        with contextlib.suppress(client.ShimGone):
            self.link.wait(lambda _: False, WAIT_SECONDS)

    def close(self) -> None:
        if self._link is not None:
            with contextlib.suppress(client.ShimGone):
                self._link.send("stop", grace_seconds=0.0)
            self.wait_for_end()
            self._link.close()
        client.clean_up_after_shim(self.run_dir)


@pytest.fixture(scope="session")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[client.Fork]:
    """Forks shims and env hosts from a process that has imported them, as the daemon does."""
    zygote = Zygote(tmp_path_factory.mktemp("fork"), "openenvd.environments.shim.forked")
    yield zygote.fork
    zygote.close()


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """One for all tests of a module; servers have the variables that it was started with."""
    folder = tmp_path_factory.mktemp("zygote")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        zygote = Zygote(folder)
        yield zygote
    zygote.close()


@pytest.fixture(params=["program", pytest.param("forked", marks=ON_LINUX)])
def replica(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    """Makes replicas whose shims are not started yet: `replica(memory_limit_bytes=…)`.

    Every test of a shim holds for one that is a program, and for one that was forked.
    """
    made: list[Replica] = []
    way = {}
    if request.param == "forked":
        way = request.getfixturevalue("zygote").changes()

    def make(**changes: Any) -> Replica:
        made.append(Replica(tmp_path / str(len(made)), **way | changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def one(replica: Callable[..., Replica]) -> Replica:
    return replica().ready()


@pytest.fixture
def cgroups() -> Iterator[CgroupManager]:
    """A manager of real groups; skips where the machine allows none."""
    manager = CgroupManager(f"test-{os.getpid()}")
    if not manager.available:
        pytest.skip(f"no memory cgroups here: {manager.why_not}")
    yield manager
    assert manager.remove()


@pytest.fixture(autouse=True)
def no_process_survives() -> Iterator[None]:
    adopt_orphans()
    before = set(children_of(os.getpid()))
    yield
    before |= Zygote.pids
    for _ in range(2):  # a zygote has left us what it had not reaped
        _collect_dead(before)
    survivors = set(children_of(os.getpid())) - before
    adopted = [each for pid in Zygote.pids for each in psutil.Process(pid).children()]
    assert not psutil.wait_procs(adopted, WAIT_SECONDS)[1], "left below the zygote"
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    adopt_orphans(False)  # other rooms' tests are not
    assert not survivors


def _collect_dead(ours: set[int]) -> None:
    """Shims that were stopped are exiting; others are reaped if they have."""
    for pid in set(children_of(os.getpid())) - ours:
        fd = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(2000)
            os.waitpid(pid, os.WNOHANG)
        finally:
            os.close(fd)
