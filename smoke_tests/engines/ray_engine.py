# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster for tests: a real head and further nodes, all on this machine.

Its files are below a temporary folder and its ports are free ones, so several clusters can run
beside each other and beside the machine's own. A signal to the process group of a `ray start` ends
the node's daemons, and their workers end with them. Nodes that are `elsewhere` have network
namespaces of their own on a bridge, whose address on this machine is the head's.
"""

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .links import NETWORKS, cut, ip, make_bridge, namespace_on, why_no_namespace

INSTALL = "pip install '.[ray]'"
START_SECONDS = 120.0  # `ray start` imports much, and the machine may be busy
STARTS = 4  # of a node: Ray waits only 30 s for one, also on a busy machine
STOP_SECONDS = 5.0
CPUS = 16  # of each node, by an option of `ray start`
MEMORY_BYTES = 8 * 10**9
OBJECT_STORE_BYTES = 80 * 10**6
WORKER_PORTS = range(10_000, 20_000, 200)  # where the 200 ports of a node's workers may begin
_PORTS = range(20_000, 32_000)  # below the ports of outgoing connections
_NETWORK = NETWORKS["ray"]
_QUIET = {
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",  # otherwise Ray starts an idle worker per CPU
    "RAY_worker_niceness": "0",  # by default 15, a low priority
}


def why_not() -> str | None:
    """Return why there can be no such cluster here, or None."""
    return None if importlib.util.find_spec("ray") else f"no ray in this Python: {INSTALL}"


def why_no_other_node() -> str | None:
    """Return why no node can be elsewhere here, or None."""
    return why_not() or why_no_namespace()


@dataclass
class RayCluster:
    """A cluster.

    Attributes:
        folder: The folder of all its files.
        port: The port of its head.
        nodes: The number of its nodes.
        host: The address of its head.
        bridge: The bridge if all nodes but the head are elsewhere; None: no node is.
        gpus: The number of GPUs that the head reports.
        settings: Variables of its daemons.
        groups: The process groups of its nodes, by their numbers.
        held: Sockets that reserve the ports of a node's workers, by node.
    """

    folder: Path
    port: int
    nodes: int
    host: str = field(default_factory=lambda: _host())
    bridge: str | None = None
    gpus: int = 0
    settings: dict[str, str] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    held: dict[int, socket.socket] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        return {"RAY_ADDRESS": f"{self.host}:{self.port}"}

    def start(self) -> None:
        """Start all nodes, the head first; return when each has joined."""
        for number in range(self.nodes):
            self.start_node(number)

    def start_node(self, number: int) -> None:
        """Start one node; the head is number 0."""
        for _ in range(STARTS):
            if self._start_node(number) == 0:
                return
            self.stop_node(number)
        raise AssertionError(self._log(number).read_text(errors="replace")[-2000:])

    def _start_node(self, number: int) -> int:
        self.held[number], first = _worker_ports()
        command = [
            *self._inside(number),
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *self._role(number)),
            *(f"--num-cpus={CPUS}", f"--num-gpus={0 if number else self.gpus}"),
            *(f"--memory={MEMORY_BYTES}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
            f"--min-worker-port={first + 1}",
            f"--max-worker-port={first + WORKER_PORTS.step - 1}",
            *("--disable-usage-stats", "--include-log-monitor=false"),
        ]
        with self._log(number).open("ab") as output:
            starting = subprocess.Popen(
                command,
                env={**_bare(os.environ), **_QUIET, **self.settings},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.groups[number] = starting.pid
        return starting.wait(START_SECONDS)

    def _log(self, number: int) -> Path:
        return self.folder / f"node-{number}.out"

    def _inside(self, number: int) -> list[str]:
        """Return a prefix for commands at a node (`ip netns exec` would hide the cgroups)."""
        is_elsewhere = number and self.bridge is not None
        return ["nsenter", f"--net=/run/netns/{self.bridge}n{number}"] if is_elsewhere else []

    def _role(self, number: int) -> list[str]:
        if number:
            own = [f"--node-ip-address={self.address_of(number)}"] if self.bridge else []
            return [f"--address={self.environ['RAY_ADDRESS']}", *own]
        head = [f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        return ["--head", *head, "--no-monitor", f"--node-ip-address={self.host}"]

    def address_of(self, number: int) -> str:
        if not number or self.bridge is None:
            return self.host
        return _address(self.bridge, 1 + number)

    def cut(self, number: int) -> None:
        """Disconnect a node that is elsewhere from all others."""
        cut(f"{self.bridge}n{number}")

    def join(self, number: int) -> None:
        cut(f"{self.bridge}n{number}", is_cut=False)

    def stop(self) -> None:
        """Stop all nodes; nothing of them is left when this returns."""
        for number in sorted(self.groups, reverse=True):
            self.stop_node(number, signal.SIGKILL)  # SIGTERM would take seconds

    def stop_node(self, number: int, by: signal.Signals = signal.SIGTERM) -> None:
        """End a node's daemons by a signal, and wait until they and their workers are gone."""
        self.held.pop(number).close()
        members = self.processes_on(number)
        group = self.groups.pop(number)
        for sent in (by, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, sent)
            deadline = time.monotonic() + STOP_SECONDS
            while members and time.monotonic() < deadline:
                members = [each for each in members if _runs(each)]
                time.sleep(0.05)
        assert not members, f"these do not end: {members}"

    def processes_on(self, number: int) -> list[psutil.Process]:
        return [p for each in _members(self.groups.get(number, -1)) for p in (each, *_below(each))]

    @property
    def gcs(self) -> psutil.Process:
        [found] = [each for each in _members(self.groups[0]) if each.name() == "gcs_server"]
        return found

    def run(self, script: str, *arguments: str) -> str:
        """Run Python as a program of the cluster; returns its output."""
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env={**_bare(os.environ), **_QUIET, **self.environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@contextlib.contextmanager
def ray_cluster(
    nodes: int = 1, *, elsewhere: bool = False, settings: Mapping[str, str] | None = None
) -> Iterator[RayCluster]:
    """Start a cluster; nothing of it is left afterwards.

    Args:
        nodes: The number of nodes, including the head.
        elsewhere: Whether all but the head have addresses of their own, as other machines have.
        settings: Variables of its daemons.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder())
        cluster = RayCluster(folder, _free_port(), nodes, settings={**(settings or {})})
        if elsewhere:
            cluster.bridge = stack.enter_context(_joined(nodes - 1))
            cluster.host = _address(cluster.bridge, 1)
        stack.enter_context(_running(cluster))
        yield cluster


@contextlib.contextmanager
def _joined(count: int) -> Iterator[str]:
    """Make namespaces on a bridge, and yield the bridge's name: `BRIDGEnN` is the Nth one."""
    with contextlib.ExitStack() as stack:
        bridge = make_bridge("oer", _NETWORK)
        stack.callback(ip, "link", "delete", bridge)
        for number in range(1, count + 1):
            address = _address(bridge, 1 + number)
            stack.enter_context(namespace_on(bridge, f"{bridge}n{number}", address))
        yield bridge


def _address(bridge: str, host: int) -> str:
    return f"{_NETWORK}.{bridge.removeprefix('oer')}.{host}"


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="oer-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _running(cluster: RayCluster) -> Iterator[None]:
    try:
        cluster.start()
        yield
    finally:
        cluster.stop()


def _bare(environ: object) -> dict[str, str]:
    assert isinstance(environ, os._Environ)
    return {name: value for name, value in environ.items() if not name.startswith("RAY_")}


def _members(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == group:
                found.append(process)
    return found


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _below(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _host() -> str:
    from ray._private.services import get_node_ip_address

    return str(get_node_ip_address())


def _worker_ports() -> tuple[socket.socket, int]:
    """Reserve ports for a node's workers; returns the socket that holds them and the first one."""
    for first in random.sample(WORKER_PORTS, len(WORKER_PORTS)):
        held = socket.socket()
        try:
            held.bind(("0.0.0.0", first))
        except OSError:
            held.close()
        else:
            return held, first
    raise AssertionError("all ports of workers are held")


def _free_port() -> int:
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port
