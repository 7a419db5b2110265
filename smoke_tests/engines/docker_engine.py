# SPDX-License-Identifier: Apache-2.0
"""A Docker engine for tests: a real dockerd in a temporary folder, on a bridge of its own.

No registry is used: the base image is made once from Debian's packages, has the name of our images'
default base, and is kept in the cache of the smoke tests. dockerd sets no rules of the packet
filter, so that several engines can run beside each other; docker-proxy forwards the ports of
containers on 127.0.0.1, as it also does with such rules.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

from openenvd.schema.spec import DEFAULT_BASE

from .. import background
from . import links
from .links import NETWORKS, ip, make_bridge, namespace_on

NEEDED = ("dockerd", "containerd", "docker", "mmdebstrap", "ip")
INSTALL = "apt-get install docker.io mmdebstrap iproute2"
STOP_SECONDS = 30.0
CONFIGURATION = "daemon.json"
SWARM_BRIDGE = "docker_gwbridge"
BRIDGES = "oed"  # oedN has the subnet NETWORK.N.0/24
NETWORK = NETWORKS["docker"]


def why_not() -> str | None:
    """Return why no engine can be started here, or None."""
    if os.getuid() != 0:
        return "dockerd needs root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"{', '.join(missing)} missing: {INSTALL}" if missing else None


@dataclass
class DockerEngine:
    """A running engine."""

    folder: Path
    bridge: str
    process: background.Program
    live_restore: bool = True
    namespace: str | None = None  # of a network of its own

    @property
    def address(self) -> str:
        return _address(self.bridge)

    @property
    def subnet(self) -> str:
        return f"{self.address[:-1]}0/24"

    @property
    def host(self) -> str:
        """The value of `DOCKER_HOST`."""
        return f"unix://{self.folder}/docker.sock"

    def docker(self, *arguments: str, stdin: Path | None = None) -> str:
        """Run `docker ARGUMENTS`; returns the output."""
        with contextlib.ExitStack() as stack:
            file = None if stdin is None else stack.enter_context(stdin.open("rb"))
            done = subprocess.run(
                ["docker", "--host", self.host, *arguments],
                stdin=file,
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
        return done.stdout.strip()

    def configure(self, settings: dict[str, object]) -> None:
        (self.folder / CONFIGURATION).write_text(json.dumps(settings))
        self.stop()
        self.start()

    def kill(self) -> None:
        """Kill dockerd by SIGKILL; its containers continue."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop dockerd orderly; with live restore, its containers continue."""
        background.end(self.process)

    def start(self) -> None:
        """Start dockerd, and wait until it answers."""
        # If no init process reaps the orphans of a killed dockerd, its containerd seems alive.
        for name in ("docker.pid", "exec/containerd/containerd.pid"):
            (self.folder / name).unlink(missing_ok=True)
        self.process = _start(
            self.folder, self.bridge, live_restore=self.live_restore, namespace=self.namespace
        )


@contextlib.contextmanager
def docker_engine(
    cache: Path, *, swarm: bool = False, has_base: bool = True
) -> Iterator[DockerEngine]:
    """Start an engine that has the base image; nothing of it is left afterwards.

    Args:
        cache: The folder that keeps the base image between runs.
        swarm: Whether the engine is the manager of a new swarm, which allows no live restore.
        has_base: Whether it has the base image; False: it has no image.
    """
    # Not below /tmp/pytest-…: the paths of its sockets would be too long.
    folder = Path(tempfile.mkdtemp(prefix="oed-"))
    (folder / CONFIGURATION).write_text("{}")
    bridge = make_bridge(BRIDGES, NETWORK)
    try:
        process = _start(folder, bridge, live_restore=not swarm)
        engine = DockerEngine(folder, bridge, process, live_restore=not swarm)
        try:
            if has_base:
                import_base(engine, cache)
            with _swarm(engine) if swarm else contextlib.nullcontext():
                yield engine
        finally:
            _end(engine)
    finally:
        subprocess.run(["ip", "link", "delete", bridge], check=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _swarm(engine: DockerEngine) -> Iterator[None]:
    """Make the engine the manager of a swarm, with its own bridge in place of the shared one."""
    bridge = f"{engine.bridge}gw"
    options = {"name": bridge, "enable_icc": "false", "enable_ip_masquerade": "false"}
    words = [f"--opt=com.docker.network.bridge.{name}={value}" for name, value in options.items()]
    subnet = f"--subnet={engine.subnet.replace(NETWORK, NETWORKS['docker swarms'])}"
    engine.docker("network", "create", subnet, *words, SWARM_BRIDGE)
    address = engine.address
    engine.docker("swarm", "init", "--advertise-addr", address, "--listen-addr", address)
    try:
        yield
    finally:
        engine.docker("swarm", "leave", "--force")
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True, check=False)


@contextlib.contextmanager
def other_node(manager: DockerEngine, images: Sequence[str]) -> Iterator[DockerEngine]:
    """Add a worker to a manager's swarm, as if on another machine.

    It has a network namespace with an address on the manager's bridge; `cut` disconnects it.

    Args:
        manager: The manager.
        images: The manager's images that are copied to it.
    """
    name = f"{manager.bridge}n"
    address = f"{manager.address.rpartition('.')[0]}.250"
    own_address = manager.address.replace(NETWORK, NETWORKS["docker other node"])
    folder = Path(tempfile.mkdtemp(prefix="oed-"))
    (folder / CONFIGURATION).write_text("{}")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(namespace_on(manager.bridge, name, address))
        for words in (
            ("link", "add", name, "type", "bridge"),
            ("address", "add", f"{own_address}/24", "dev", name),
            ("link", "set", name, "up"),
        ):
            ip("-n", name, *words)
        process = _start(folder, name, live_restore=False, namespace=name)
        engine = DockerEngine(folder, name, process, live_restore=False, namespace=name)
        try:
            archive = folder / "images.tar"
            manager.docker("save", "--output", str(archive), *images)
            engine.docker("load", "--input", str(archive))
            token = manager.docker("swarm", "join-token", "--quiet", "worker")
            own = ("--advertise-addr", address, "--listen-addr", address)
            engine.docker("swarm", "join", *own, "--token", token, f"{manager.address}:2377")
            yield engine
        finally:
            cut(engine, is_cut=False)
            _end(engine)


def cut(node: DockerEngine, *, is_cut: bool = True) -> None:
    """Disconnect another node from the rest, or connect it again."""
    links.cut(str(node.namespace), is_cut=is_cut)


def why_no_other_node() -> str | None:
    """Return why there can be no second node here, or None."""
    if (reason := why_not()) is not None:
        return reason
    return links.why_no_namespace()


def import_base(engine: DockerEngine, cache: Path) -> None:
    """Import the base image into an engine, which takes five seconds of a processor."""
    engine.docker("import", str(base_image(cache)), DEFAULT_BASE)


def base_image(cache: Path) -> Path:
    """Return an archive of a small Debian with Python and uv, made once."""
    archive = cache / "debian-python.tar"
    if not archive.exists():
        partial = cache / "debian-python.partial.tar"
        command = [
            "mmdebstrap",
            "--variant=minbase",
            "--include=python3,python3-venv,ca-certificates",
            "--dpkgopt=path-exclude=/usr/share/doc/*",
            "--dpkgopt=path-exclude=/usr/share/man/*",
            f"--customize-hook=copy-in {find_uv_bin()} /usr/local/bin",
            "--customize-hook=ln -s python3 $1/usr/bin/python",
            "--customize-hook=rm -rf $1/var/lib/apt/lists $1/var/cache/apt",
            "bookworm",
            str(partial),
        ]
        subprocess.run(command, check=True)
        partial.rename(archive)
    return archive


def _start(
    folder: Path, bridge: str, *, live_restore: bool, namespace: str | None = None
) -> background.Program:
    options = {
        "data-root": folder / "data",
        "exec-root": folder / "exec",
        "pidfile": folder / "docker.pid",
        "host": f"unix://{folder}/docker.sock",
        "bridge": bridge,
        "ip": "127.0.0.1" if namespace is None else "0.0.0.0",
        "config-file": folder / CONFIGURATION,
    }
    switches = [
        f"--live-restore={str(live_restore).lower()}",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-masq=false",
    ]
    # Not `ip netns exec`, which hides the cgroups, too.
    inside = [] if namespace is None else ["nsenter", f"--net=/run/netns/{namespace}"]
    words = (f"--{name}={value}" for name, value in options.items())
    log, asked = folder / "dockerd.log", ["docker", "--host", str(options["host"]), "version"]
    process = background.start([*inside, "dockerd", *words, *switches], log)
    background.wait_until(
        lambda: subprocess.run(asked, capture_output=True, check=False).returncode == 0,
        {log: process},
    )
    return process


def _end(engine: DockerEngine) -> None:
    """Stop containers first, because dockerd with live restore would leave them; then all else."""
    if engine.process.poll() is not None:
        engine.start()
    if left := engine.docker("ps", "--all", "--quiet").split():
        engine.docker("rm", "--force", "--volumes", *left)
    engine.stop()
    _stop_containerd(engine.folder)
    background.unmount_below(engine.folder)


def _stop_containerd(folder: Path) -> None:
    """Stop the containerd that a killed dockerd has left."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "exec" / "containerd" / "containerd.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)


def _address(bridge: str) -> str:
    return f"{NETWORK}.{bridge.removeprefix(BRIDGES)}.1"
