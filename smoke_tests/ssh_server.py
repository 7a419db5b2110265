# SPDX-License-Identifier: Apache-2.0
"""A login node and a laptop: a real sshd of one's own, and a network that reaches it alone.

    laptop (a namespace) ──NETWORK.n.2 ══ NETWORK.n.1──▶ sshd, on this machine

Keys, configuration and the list of known hosts are below a temporary folder, and this user's own
are not read: a script `ssh`, first in the laptop's PATH, names that configuration to the real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from .links import NETWORKS, make_namespace, remove_namespace

SSHD = "/usr/sbin/sshd"
INSTALL = "apt-get install openssh-server openssh-client iproute2"
HOST = "login"  # the name of the machine in the laptop's configuration
PORT = 2222
NETWORK = NETWORKS["laptop"]
START_SECONDS = 10.0
_CLONE_NEWNET = 0x40000000

_SSHD_CONFIG = """\
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
SetEnv {variables}
"""
_CONFIG = """\
Host nowhere
  HostName nowhere.invalid
Host stranger
  IdentityFile {folder}/other_key
Host unknown
  UserKnownHostsFile /dev/null
Host * !stranger
  IdentityFile {folder}/key
Host *
  HostName {address}
  Port {port}
  User root
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
"""


def why_not() -> str | None:
    """Why there can be no login node here; None when there can."""
    if os.getuid() != 0:
        return "sshd and network namespaces need root"
    if not all(map(shutil.which, (SSHD, "ssh", "ip"))):
        return f"sshd, ssh or ip missing: {INSTALL}"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return f"no network namespace: {made.stderr.decode().strip()}" if made.returncode else None


@dataclass
class LoginNode:
    """A running sshd.

    Attributes:
        folder: Its files, and those of the laptop's configuration.
        laptop: The namespace of the laptop, and the name of the link to it.
        process: Its first process; None: it was stopped.
    """

    folder: Path
    laptop: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        """Where openenvd has its files there."""
        return self.folder / "home-there"

    @property
    def path(self) -> str:
        """The laptop's PATH."""
        return f"{self.folder}/bin{os.pathsep}{os.environ['PATH']}"

    def on_laptop(self, command: str) -> str:
        """Return a command that runs another one in the laptop's network."""
        script = self.folder / "bin" / Path(command).name
        script.write_text(
            f'#!/bin/sh\nexec nsenter --net=/run/netns/{self.laptop} {command} "$@"\n'
        )
        script.chmod(0o755)
        return str(script)

    def start(self) -> None:
        """Listen, and wait until it does."""
        with (self.folder / "sshd.log").open("ab") as log:
            config = str(self.folder / "sshd_config")
            self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not self._listens():
            said = (self.folder / "sshd.log").read_text(errors="replace")
            assert self.process.poll() is None, f"sshd has ended: {said}"
            assert time.monotonic() < deadline, f"sshd does not listen: {said}"
            time.sleep(0.05)

    def _listens(self) -> bool:
        assert self.process is not None
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self.process.pid).net_connections("tcp")
            return any(each.status == psutil.CONN_LISTEN for each in found)
        return False

    def stop(self) -> None:
        """End it with all of its connections, and what runs through them."""
        if self.process is not None:
            everything = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            self.process = None
            for each in everything:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            psutil.wait_procs(everything, timeout=START_SECONDS)

    @contextlib.contextmanager
    def on_the_laptop(self) -> Iterator[None]:
        """Have this thread in the laptop's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{self.laptop}") as there:
            assert libc.setns(there.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(here.fileno(), _CLONE_NEWNET) == 0


@contextlib.contextmanager
def login_node(folder: Path, **variables: str) -> Iterator[LoginNode]:
    """A login node whose sessions have these variables; nothing of it is left afterwards."""
    node = LoginNode(folder, make_namespace("oel", NETWORK))
    try:
        _write_files(node, variables)
        node.start()
        yield node
    finally:
        node.stop()
        remove_namespace(node.laptop)


def _address(laptop: str, host: int) -> str:
    return f"{NETWORK}.{laptop.removeprefix('oel')}.{host}"


def _write_files(node: LoginNode, variables: dict[str, str]) -> None:
    folder, address = node.folder, _address(node.laptop, 1)
    for name in ("host_key", "key", "other_key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True)
    kind, public, *_ = (folder / "host_key.pub").read_text().split()
    (folder / "known_hosts").write_text(f"[{address}]:{PORT} {kind} {public}\n")
    there = {"OPENENV_HOME": str(node.home), **variables}
    named = " ".join(f"{name}={value}" for name, value in there.items())
    text = _SSHD_CONFIG.format(address=address, port=PORT, folder=folder, variables=named)
    (folder / "sshd_config").write_text(text)
    (folder / "config").write_text(_CONFIG.format(address=address, port=PORT, folder=folder))
    script = folder / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    script.chmod(0o755)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's own, which its package makes
