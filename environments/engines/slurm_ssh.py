# SPDX-License-Identifier: Apache-2.0
"""Slurm from a machine that reaches its login node only by ssh (`openenv up --slurm-ssh HOST`).

    agent: SlurmOverSsh ──one ssh connection──▶ slurm_login.py on the login node ──▶ SlurmEngine
       │                                          sbatch, squeue, files: all there, as if the daemon
       │                                          ran there
       └─ 127.0.0.1:PORT ──the same connection──▶ the replica's own address, at its node

The login node has openenvd of the same version, in a folder that the nodes see, as it would have if
the daemon ran there (`--slurm-ssh-python`). What is launched is copied there and prepared there
before the first job is submitted (`../providers/prepared_there.py`). Each replica has a folder
below openenvd's home there, and its port here is forwarded, at the one reserved for it if possible.

Failure cases

    the connection is lost         everything that is asked raises `EngineGone`: replicas stay as
                                   they are, `status` says why. Jobs go on; sessions that went
                                   through the connection are lost. The next one forwards the same
                                   ports, and nothing is restarted
    the login node is restarted    the same
    this agent is killed           the connection goes on with its ports, for sessions or 3 s; the
                                   next agent uses it, and knows its ports by `forwards.json`
    a port is taken meanwhile      another is forwarded; the replica's address is another
    the login node forwards none   `EngineRefused`, which names the option of its sshd
    openenvd is missing there,     `EngineGone`, with the command that installs it; tried again
    or of another version
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, ClassVar
from urllib.parse import urlsplit

from ...shim.files import write_json
from ..engine_address import EngineAddress
from ..layout import Layout, make_private
from .base import (
    Check,
    Engine,
    EngineError,
    EngineGone,
    EngineRefused,
    Instance,
    InstanceState,
    ReplicaPlan,
)
from .remote_engine import EngineChannel, RemoteEngine, read_check
from .slurm import SlurmEngine
from .slurm_address import HOST_VARIABLE, PYTHON_VARIABLE, REPORT_VARIABLE, slurm_address
from .slurm_copies import Copies
from .slurm_reporting import SlurmReporting
from .ssh_connection import SshConnection

AGAIN_SECONDS = 2.0  # after a connection that could not be made
FORWARDS_FILE_NAME = "forwards.json"
PROBE_SECONDS = 2.0  # for a replica to answer through a port that was just forwarded
_NO_PROGRAM = (126, 127)  # a shell's exit codes

Forwards = dict[str, tuple[int, str]]  # by replica: the port here, and `host:port` there


def slurm_engine() -> Engine:
    """Return Slurm's engine: of this machine, or of the one that a setting names."""
    if os.environ.get(HOST_VARIABLE):
        return SlurmOverSsh(os.environ)
    return SlurmReporting(os.environ) if os.environ.get(REPORT_VARIABLE) else SlurmEngine()


class LoginNode:
    """The login node, as this home reaches it."""

    def __init__(self, environ: Mapping[str, str], layout: Layout) -> None:
        """Nothing is connected yet."""
        self._python = environ.get(PYTHON_VARIABLE) or ""
        self.home_label = layout.home_label
        self.connection = SshConnection(environ[HOST_VARIABLE], make_private(layout.sockets))

    @property
    def host(self) -> str:
        """What it is called."""
        return self.connection.host

    def command(self, module: str) -> list[str]:
        """Return the command that runs a module of openenvd there."""
        return self.connection.command([self._python, "-P", "-m", module])

    def failure(self, code: int, told: IO[bytes]) -> EngineGone:
        """Return why such a command has ended."""
        told.seek(0)
        said = told.read().decode(errors="replace")
        if code in _NO_PROGRAM or "No module named" in said:
            return EngineGone(
                f"the host {self.host} has no openenvd at {self._python}",
                "install it there, in a folder that the nodes see: python3 -m venv ~/openenvd && "
                "~/openenvd/bin/pip install FOLDER, a clone of openenvd; another one: "
                "openenv up --slurm-ssh-python",
            )
        return self.connection.failure(told)


class SlurmOverSsh(RemoteEngine):
    """Runs replicas as jobs of the cluster that a login node leads to."""

    name: ClassVar[str] = "slurm"

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._layout = layout = Layout(Path(environ["OPENENV_HOME"]))
        at = EngineAddress.of(self.name, slurm_address(environ))
        self._node = LoginNode(environ, layout)
        self._refused: set[str] = set()  # replicas that the login node may not connect to
        self._copies = Copies(self._layout)
        self._connecting = threading.Lock()
        self._channel: EngineChannel | None = None
        self._failed: tuple[float, EngineGone] | None = None  # when, and why
        self._is_closed = False
        self._ports = threading.Lock()
        self._path = layout.engines / at.key / FORWARDS_FILE_NAME
        self._forwards = _read_forwards(self._path)
        self._forwarded: set[str] = set()  # replicas whose ports this channel's connection forwards

    def channel(self) -> EngineChannel:
        """Return the channel to the login node."""
        with self._connecting:
            if self._channel is not None and self._channel.is_open:
                return self._channel
            if self._is_closed:
                raise EngineGone("the engine was closed")
            if self._failed is not None and time.monotonic() < self._failed[0] + AGAIN_SECONDS:
                raise EngineGone(self._failed[1].message, self._failed[1].hint)
            try:
                self._refused.clear()
                channel = self._channel = self._connect()
            except EngineGone as exc:
                self._failed = (time.monotonic(), exc)
                raise
        self._remove_copies()  # which waits for others that do, and they may wait for a channel
        return channel

    def _connect(self) -> EngineChannel:
        self._node.connection.open()
        with self._ports:  # a master that this did not make, in the lost one's place, has none
            self._forwarded.clear()
            for replica in list(self._forwards):
                self._forward_again(replica)
        return self._start()

    def _start(self) -> EngineChannel:
        command = self._node.command(f"{__package__}.slurm_login")
        return EngineChannel(command, self._node.host, self._node.failure)

    def check(self) -> Check:
        """Tell whether jobs can be submitted there; through a connection of its own."""
        try:
            channel = self._start()
        except EngineGone as exc:
            return Check(problem=exc.message, remedy=exc.hint)
        try:
            return read_check(channel.ask("check"))
        except EngineGone as exc:
            return Check(problem=exc.message, remedy=exc.hint)
        finally:
            channel.close()

    def find(self, plan: ReplicaPlan) -> Instance | None:
        """Return the job of a replica, with the address that it is reached at from here."""
        found = super().find(plan)
        if found is None or found.address is None or found.state is not InstanceState.RUNNING:
            return found
        if plan.labels.replica in self._refused:  # told once: what cannot be reached is stopped
            return replace(found, address=None)
        target = urlsplit(found.address).netloc
        port = self._forward(plan.labels.replica, plan.port, target)
        return replace(found, address=f"http://127.0.0.1:{port}")

    def start(self, plan: ReplicaPlan) -> Instance:
        """Submit a job."""
        self._copies.started(plan.labels.replica)
        return super().start(plan)

    def remove(self, instance: Instance) -> None:
        """Remove a job, and forward its port no more."""
        super().remove(instance)
        with self._ports:
            if (known := self._forwards.pop(instance.labels.replica, None)) is not None:
                self._node.connection.cancel(*known)
                self._forwarded.discard(instance.labels.replica)
                self._write_forwards()
        self._refused.discard(instance.labels.replica)
        self._copies.removed(instance.labels.replica)
        self._remove_copies()

    def _remove_copies(self) -> None:
        """Have copies removed that no replica uses; with the next channel if this one is lost."""
        with (
            contextlib.suppress(EngineError, OSError),
            self._copies.in_use() as digests,
        ):
            if digests is not None and self._channel is not None:
                asked = {"home": self._node.home_label, "digests": sorted(digests)}
                self._channel.ask("keep_copies", **asked)

    def changes(self) -> Iterator[None]:
        """Yield when any job may have changed."""
        yield from super().changes()
        raise EngineGone("the engine was closed")

    def close(self) -> None:
        """End the channel; the connection ends when nothing goes through it any more."""
        with self._connecting:
            self._is_closed = True
            if self._channel is not None:
                self._channel.close()

    # Ports

    def _forward(self, replica: str, wanted: int, target: str) -> int:
        """Forward a port of this machine to a replica; which one."""
        with self._ports:
            known = self._forwards.get(replica)
            if known is not None and known[1] != target:  # it is on another node
                self._node.connection.cancel(*known)
                self._forwarded.discard(replica)
                known = None
            if known is None:
                self._forwards[replica] = (wanted, target)
            if is_new := replica not in self._forwarded:
                self._forward_again(replica)
            if replica not in self._forwarded:
                raise EngineGone(f"no port can be forwarded to {target}, through {self._node.host}")
            port = self._forwards[replica][0]
        if is_new:
            self._check_forwarded(replica, port, target)
        return port

    def _check_forwarded(self, replica: str, port: int, target: str) -> None:
        """Ask through a port that was just forwarded: ssh says only then that it may not be.

        Raises:
            EngineRefused: The login node may not connect to the replica.
        """
        if not _is_closed(port):
            return
        if (said := self._node.connection.refusal(target)) is not None:
            self._forwarded.discard(replica)
            self._refused.add(replica)
            raise EngineRefused(
                f"the host {self._node.host} does not forward connections to {target} ({said})",
                "its sshd needs `AllowTcpForwarding yes` (or `local`), no `DisableForwarding`, and "
                "a `PermitOpen` that names its nodes: ask whoever runs it",
            )

    def _forward_again(self, replica: str) -> None:
        port, target = self._forwards[replica]
        for each in (port, _free_port()):
            if self._node.connection.forward(each, target):
                self._forwards[replica] = (each, target)
                self._forwarded.add(replica)
                break
        self._write_forwards()

    def _write_forwards(self) -> None:
        with contextlib.suppress(OSError):  # the next agent asks for all of them again
            make_private(self._path.parent)
            write_json(str(self._path), self._forwards)


def _read_forwards(path: Path) -> Forwards:
    try:
        return {
            name: (int(port), str(to)) for name, (port, to) in json.loads(path.read_bytes()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _is_closed(port: int) -> bool:
    """Whether connections to a port of this machine end at once, without a byte."""
    try:
        with socket.create_connection(("127.0.0.1", port), PROBE_SECONDS) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return not connection.recv(1)
    except TimeoutError:  # the replica is still busy with its imports
        return False
    except OSError:
        return True


def _free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
