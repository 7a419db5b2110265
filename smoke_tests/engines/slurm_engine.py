# SPDX-License-Identifier: Apache-2.0
"""A Slurm cluster for tests: a real munged, slurmctld and several slurmd on this machine.

All its files are below a temporary folder: configuration, keys, spool folders, logs. It has free
ports and its own names of nodes, which are also those of their cgroups, so several clusters can run
beside each other and beside the machine's own, whose /etc/slurm is not read. Accounting, which
needs a database, is off, as on many clusters.

Memory is limited by `task/cgroup` if this machine's cgroups are of version 1. Otherwise
(`limits_memory` is false) `proctrack/linuxproc` follows processes, and none is killed for memory.
"""

import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .. import background
from .links import NETWORKS, cut, make_namespace, remove_namespace, why_no_namespace

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
INSTALL = "apt-get install slurm-wlm slurmd slurmctld munge"
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"  # where munged and slurmd are
LOST_SECONDS = 300  # `SlurmdTimeout` where a node can be cut off: Slurm's own default
CPUS, MEMORY_MB = 4, 4096  # of each node, by the configuration
CGROUPS = Path("/sys/fs/cgroup")
NETWORK = NETWORKS["slurm"]  # of the node that is elsewhere: the namespace oesN has NETWORK.N
_PORTS = range(28_000, 32_000, 8)  # blocks, below the ports of outgoing connections
_HERE = Path(__file__).parent
_HELD: list[socket.socket] = []  # sockets whose names reserve our blocks

_NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr={address} Port={port} "
    f"CPUs={CPUS} RealMemory={MEMORY_MB} Weight={{weight}} State=UNKNOWN"
)
_NO_GATHERING = "JobAcctGatherType=jobacct_gather/none"
_OVER_MEMORY_KILL = """\
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherParams=OverMemoryKill
JobAcctGatherFrequency=task=1"""


def why_not() -> str | None:
    """Return why no cluster can be started here, or None."""
    if os.getuid() != 0:
        return "slurmd needs root"
    missing = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    return f"{', '.join(missing)} missing: {INSTALL}" if missing else None


def limits_memory() -> bool:
    """Return whether Slurm can limit memory here: it takes cgroups of version 1."""
    return all((CGROUPS / name / "tasks").exists() for name in ("memory", "freezer", "cpuset"))


@dataclass
class SlurmCluster:
    """A running cluster.

    Attributes:
        folder: The folder of all its files.
        nodes: The names of its nodes.
        ports: The ports of slurmctld and of the nodes' daemons.
        gpus: The GPUs that the first node reports.
        namespace: The network namespace of the last node, which is also its link's name; None: the
            node has this machine's network.
        kills_over_memory: Whether its accounting kills for memory, without cgroups.
        processes: Its daemons, by the names of their logs.
    """

    folder: Path
    nodes: tuple[str, ...]
    ports: list[int]
    gpus: int = 0
    namespace: str | None = None
    kills_over_memory: bool = False
    processes: dict[str, background.Program] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def run(self, *command: str) -> str:
        """Run a command of Slurm's; returns its output."""
        environ = {**os.environ, **self.environ}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    @property
    def host(self) -> str:
        return "127.0.0.1" if self.namespace is None else _address(self.namespace, 1)

    def address_of(self, node: str) -> str:
        is_other = self.namespace is not None and node == self.nodes[-1]
        return _address(str(self.namespace), 2) if is_other else "127.0.0.1"

    def cut(self) -> None:
        """Cut the last node off: neither its packets nor its writes leave it."""
        cut(str(self.namespace))
        for process in self.writers():
            process.suspend()

    def join(self) -> None:
        cut(str(self.namespace), is_cut=False)
        for process in self.writers():
            process.resume()

    def processes_there(self) -> list[psutil.Process]:
        told = subprocess.run(
            ["ip", "netns", "pids", str(self.namespace)], capture_output=True, text=True, check=True
        )
        return [
            psutil.Process(int(pid)) for pid in told.stdout.split() if psutil.pid_exists(int(pid))
        ]

    def replicas_there(self) -> list[psutil.Process]:
        """List the processes of jobs on the last node, without Slurm's own."""
        return [each for each in self.processes_there() if not _name(each).startswith("slurm")]

    def writers(self) -> list[psutil.Process]:
        """List the processes of the last node that write to the shared file system for jobs."""
        return [each for each in self.processes_there() if "slurm.job" in background.title(each)]

    def start_node(self, name: str) -> None:
        is_other = self.namespace is not None and name == self.nodes[-1]
        # Not `ip netns exec`, which hides the cgroups, too.
        inside = ["nsenter", f"--net=/run/netns/{self.namespace}"] if is_other else []
        self._start(f"slurmd-{name}", *inside, "slurmd", "-D", "-N", name)

    def jobs(self, states: str = "all") -> list[str]:
        """List the ids of all jobs that have not ended, or that are in these states."""
        only = [] if states == "all" else [f"--states={states}"]
        return self.run("squeue", "--noheader", "--format=%i", *only).split()

    def set_gpus(self, count: int) -> None:
        """Give the first node this number of GPUs, the others none, and restart all daemons."""
        if count != self.gpus:
            self.gpus = count
            self.stop()
            _configure(self)
            self.start()

    def stop_controller(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop slurmctld; jobs continue."""
        background.end(self.processes.pop("slurmctld"), number)

    def start_controller(self) -> None:
        """Start slurmctld, and wait until it answers."""
        self._start("slurmctld", "slurmctld", "-D")
        self._wait_for(self._answers)

    def start(self) -> None:
        """Start all daemons, and wait until every node is idle."""
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",  # munged runs as root in a folder that other users could rename
            *(f"--{name}={self.folder}/munge/{name}" for name in ("socket", "key-file")),
            *(f"--{name}={self.folder}/munge/{name}" for name in ("pid-file", "seed-file")),
            f"--log-file={self.folder}/munge/log",
        )
        self._wait_for((self.folder / "munge" / "socket").exists)
        for name in self.nodes:
            self.start_node(name)
        self.start_controller()
        self._wait_for(self._is_idle)

    def stop(self) -> None:
        """Stop all jobs and all daemons; nothing is left when this returns."""
        with contextlib.suppress(AssertionError, RuntimeError):
            if "slurmctld" not in self.processes:
                self.start_controller()
            if self.namespace is not None:  # it may not have reported yet that its jobs have ended
                name = f"NodeName={self.nodes[-1]}"
                self.run("scontrol", "update", name, "State=DOWN", "Reason=stopped")
            self.run("scancel", "--full", "--signal=KILL", "--user=root")
            self.run("scancel", "--user=root")
            self._wait_for(lambda: not self.jobs())
        for process in reversed(self.processes.values()):
            background.end(process)
        self.processes.clear()
        for name in self.nodes:
            _remove_cgroups(name)

    def _start(self, log: str, *command: str) -> None:
        environ = {**os.environ, **self.environ}
        self.processes[log] = background.start(command, self.folder / f"{log}.out", env=environ)

    def _wait_for(self, check: Callable[[], object]) -> None:
        logs = {self.folder / f"{log}.out": process for log, process in self.processes.items()}
        background.wait_until(check, logs)

    def _answers(self) -> bool:
        environ = {**os.environ, **self.environ}
        asked = subprocess.run(
            ["scontrol", "ping"], env=environ, capture_output=True, text=True, check=False
        )
        return asked.returncode == 0 and " UP" in asked.stdout

    def _is_idle(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T")
        return states.split() == ["idle"] * len(self.nodes)


@contextlib.contextmanager
def slurm_cluster(
    nodes: int = 3,
    *,
    other: bool = False,
    kills_over_memory: bool = False,
) -> Iterator[SlurmCluster]:
    """Start a cluster, with the last node elsewhere if asked; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="oes-"))
    name = f"oes{secrets.token_hex(3)}"
    names = tuple(f"{name}n{number}" for number in range(1, nodes + 1))
    cluster = SlurmCluster(folder, names, _free_ports(nodes + 1))
    cluster.kills_over_memory = kills_over_memory
    try:
        if other:
            cluster.namespace = make_namespace("oes", NETWORK)
        _make_folders(cluster)
        _configure(cluster)
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        if cluster.namespace is not None:
            for process in cluster.processes_there():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            remove_namespace(cluster.namespace)
        shutil.rmtree(folder, ignore_errors=True)


def why_no_other_node() -> str | None:
    """Return why no node can be elsewhere here, or None."""
    return why_not() or why_no_namespace()


def _address(namespace: str, host: int) -> str:
    return f"{NETWORK}.{namespace.removeprefix('oes')}.{host}"


def _make_folders(cluster: SlurmCluster) -> None:
    folder = cluster.folder
    (folder / "munge").mkdir(mode=0o700)
    (folder / "munge" / "key-file").write_bytes(secrets.token_bytes(1024))
    (folder / "munge" / "key-file").chmod(0o400)
    (folder / "state").mkdir()
    for name in cluster.nodes:
        (folder / f"spool-{name}").mkdir()


def _configure(cluster: SlurmCluster) -> None:
    folder, (first, *_) = cluster.folder, cluster.nodes
    port, *ports = cluster.ports
    has_cgroups = limits_memory() and not cluster.kills_over_memory
    gpus = f" Gres=gpu:{cluster.gpus}" if cluster.gpus else ""
    conf = (
        _HERE.joinpath("slurm.conf")
        .read_text()
        .format(
            name=first.removesuffix("n1"),
            host=cluster.host,
            patience=10 if cluster.namespace is None else LOST_SECONDS,
            port=port,
            folder=folder,
            gathering=_OVER_MEMORY_KILL if cluster.kills_over_memory else _NO_GATHERING,
            tracking="cgroup" if has_cgroups else "linuxproc",
            task="cgroup" if has_cgroups else "none",
            nodes="\n".join(
                _node(cluster, name, port) + (gpus if name == first else "")
                for name, port in zip(cluster.nodes, ports, strict=True)
            ),
        )
    )
    (folder / "slurm.conf").write_text(conf)
    shutil.copy(_HERE / "cgroup.conf", folder)
    devices = [folder / f"gpu{number}" for number in range(cluster.gpus)]
    for device in devices:
        if not device.exists():  # Slurm accepts only device files; this one is like /dev/null
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    lines = [f"NodeName={first} Name=gpu File={each} Flags=nvidia_gpu_env" for each in devices]
    (folder / "gres.conf").write_text("".join(f"{line}\n" for line in lines))


def _node(cluster: SlurmCluster, name: str, port: int) -> str:
    """Return the line of a node; jobs go first to the one that is elsewhere."""
    address = cluster.address_of(name)
    weight = 2 if address == "127.0.0.1" else 1
    return _NODE.format(name=name, address=address, port=port, weight=weight)


def _free_ports(count: int) -> list[int]:
    """Reserve ports on which no program listens and which no other cluster takes.

    The name of an abstract Unix socket reserves a block of ports while this process lives.
    """
    for first in random.sample(_PORTS, len(_PORTS)):
        name = socket.socket(socket.AF_UNIX)
        ports = list(range(first, first + count))
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            name.bind(f"\0openenvd-smoke-slurm-{first}")
            for port in ports:
                probes.enter_context(socket.socket()).bind(("0.0.0.0", port))
            _HELD.append(name)
            return ports
        name.close()
    raise AssertionError("no block of ports is free")


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "slurm"  # it has ended


def _path() -> str:
    return f"{os.environ['PATH']}{os.pathsep}{SYSTEM_PATH}"


def _remove_cgroups(node: str) -> None:
    """Remove the cgroups that a node's daemon leaves."""
    for group in CGROUPS.glob(f"*/slurm_{node}"):
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
