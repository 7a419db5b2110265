# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes cluster for tests, in a temporary folder.

    etcd ◀── kube-apiserver ◀── kube-controller-manager, kube-scheduler
                   ▲
                   └── kubelet ──▶ containerd      of each node

A cluster has its own containerd and bridge, and sets no rules of the packet filter, so that several
run beside each other and beside Docker. This machine reaches pods at their addresses. There is no
kube-proxy, so the addresses of services do not answer.

There is one node, which has this machine's network; `other_node` adds another one, in a network
namespace of its own with an address on the first one's bridge, and `cut` disconnects the two.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import yaml

from .. import background
from ..engines import links
from ..engines.links import NETWORKS, ip, make_bridge
from . import binaries

NODE, OTHER_NODE = "node-1", "node-2"
CRI_NAMESPACE = "k8s.io"
POD_NETWORKS = (NETWORKS["kubernetes"], NETWORKS["kubernetes other node"])
SERVICES = NETWORKS["kubernetes services"]
_CONFIGURATION = Path(__file__).with_name("configuration")
_CGROUPS = Path("/sys/fs/cgroup")
_LINKS = Path("/var/log/containers")  # a kubelet makes links there, although its logs are elsewhere
Json = dict[str, Any]


@dataclass(frozen=True)
class Node:
    """A node: its runtime and its kubelet.

    Attributes:
        bridge: The bridge of its pods.
        network: The beginning of its pods' addresses.
        namespace: Its network namespace; None: it has this machine's network.
    """

    name: str
    folder: Path
    bridge: str
    address: str
    network: str
    port: int
    namespace: str | None = None

    def ctr(self, *words: str) -> str:
        """Run `ctr WORDS` in its kubelet's containerd namespace; returns the output."""
        socket_path = f"{self.folder}/containerd.sock"
        command = ["ctr", "--address", socket_path, "--namespace", CRI_NAMESPACE, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def load(self, archive: Path) -> None:
        self.ctr("images", "import", str(archive))

    def inside(self, command: list[str]) -> list[str]:
        named = self.namespace
        return command if named is None else ["nsenter", f"--net=/run/netns/{named}", *command]


@dataclass
class Cluster:
    """A running cluster."""

    folder: Path
    programs: Path
    nodes: list[Node]
    token: str
    ports: dict[str, int]
    processes: dict[str, background.Program] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The API server's address, which is that of the first node's bridge."""
        return self.nodes[0].address

    @property
    def kubeconfig(self) -> Path:
        """The value of `KUBECONFIG`."""
        return self.folder / "kubeconfig"

    def command(self, program: str) -> list[str]:
        """Return the beginning of a command of `kubectl` or `helm`."""
        return [str(self.programs / "bin" / program), "--kubeconfig", str(self.kubeconfig)]

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Run `kubectl WORDS`; returns the output."""
        done = subprocess.run(
            [*self.command("kubectl"), *words],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def get(self, path: str) -> Json:
        url = f"https://{self.address}:{self.ports['api']}{path}"
        request = Request(url, headers={"Authorization": f"Bearer {self.token}"})
        trusted = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        with urlopen(request, context=trusted, timeout=30) as response:
            found: Json = json.load(response)
        return found

    def pods(self, selector: str) -> list[Json]:
        found = self.get(f"/api/v1/pods?{urlencode({'labelSelector': selector})}")["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def kill(self, pod: Json, number: signal.Signals) -> None:
        """Send a signal to the first process of a pod's only container, without Kubernetes."""
        [status] = pod["status"]["containerStatuses"]
        container = status["containerID"].removeprefix("containerd://")
        [node] = [node for node in self.nodes if node.name == pod["spec"]["nodeName"]]
        node.ctr("tasks", "kill", "--signal", str(int(number)), container)

    def load(self, archive: Path) -> None:
        self.nodes[0].load(archive)

    def load_files(self, archives: Sequence[Path], name: str, entrypoint: list[str]) -> None:
        """Load an image into the node; each archive of files is a layer."""
        image = self.folder / "image.tar"
        layers = [archive.read_bytes() for archive in archives]
        image.write_bytes(binaries.image_of(layers, name, entrypoint))
        self.load(image)
        image.unlink()

    def set_gpus(self, count: int) -> None:
        """Let a device plugin report a number of GPUs; return when the node has them."""
        number = self.folder / "gpus"
        number.write_text(str(count))
        if "device_plugin" not in self.processes:
            words = (f"{self.folder}/kubelet/plugins_registry/gpu.sock", str(number))
            self._start("device_plugin", [str(self.programs / "bin" / "device_plugin"), *words])

        def has_them() -> bool:
            found = self.get(f"/api/v1/nodes/{NODE}")["status"]["allocatable"]
            return bool(found.get("nvidia.com/gpu") == str(count))

        self._await(has_them)

    # Its processes

    def start(self) -> None:
        """Start the processes that do not run; return when all nodes are ready."""
        for name, command in self._commands("programs.yaml").items():
            running = self.processes.get(name)
            if running is None or running.poll() is not None:
                self._start(name, command)
                if name == "apiserver":
                    self._await(lambda: self.get("/api/v1/namespaces"))
        for node in self.nodes:
            if f"containerd-{node.name}" not in self.processes:
                self._start_runtime(node)
            if f"kubelet-{node.name}" not in self.processes:
                [kubelet] = self._commands("kubelet_options.yaml", node).values()
                self._start(f"kubelet-{node.name}", node.inside(kubelet))
        self._await(lambda: all(map(self._is_ready, self.nodes)))

    def _start_runtime(self, node: Node) -> None:
        command = ["containerd", "--config", f"{node.folder}/containerd.toml"]
        self._start(f"containerd-{node.name}", node.inside(command))
        self._await(lambda: (node.folder / "containerd.sock").exists())
        self._await(lambda: node.ctr("version"))
        node.load(self.programs / "pause.tar")

    def stop_api(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop the API server; `start` starts it again."""
        self._end("apiserver", number)

    def _is_ready(self, node: Node) -> bool:
        self.get("/api/v1/namespaces/default/serviceaccounts/default")  # pods need it
        conditions = self.get(f"/api/v1/nodes/{node.name}")["status"]["conditions"]
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def _await(self, is_there: Callable[[], object]) -> None:
        def check() -> object:
            with contextlib.suppress(OSError, LookupError, subprocess.CalledProcessError):
                return is_there()
            return False

        programs = {self._log(name): process for name, process in self.processes.items()}
        background.wait_until(check, programs)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _start(self, name: str, command: list[str]) -> None:
        self.processes[name] = background.start(["nice", "-n", "5", *command], self._log(name))

    def _end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        if name in self.processes:
            background.end(self.processes[name], number)

    def _commands(self, file: str, node: Node | None = None) -> dict[str, list[str]]:
        """Return the commands of a file of programs and their options."""
        found = yaml.safe_load(_filled(self, file, node))
        return {
            name: [
                str(self.programs / "bin" / each["program"]),
                *(f"--{option}={value}" for option, value in each["options"].items()),
            ]
            for name, each in found.items()
        }


def _filled(made: Cluster, file: str, node: Node | None = None) -> str:
    """Return the text of a file of `configuration/` for a cluster or one of its nodes."""
    values: Json = {"folder": made.folder, "address": made.address, "token": made.token}
    values |= {"services": SERVICES, "programs": made.programs, **made.ports}
    values |= {"pause_image": binaries.PAUSE_IMAGE, "pods": POD_NETWORKS[0]}
    values |= {"other_pods": POD_NETWORKS[1]}
    if node is not None:
        values |= {"node": node.folder, "name": node.name, "node_address": node.address}
        values |= {"bridge": node.bridge, "network": node.network, "port": node.port}
    return Template((_CONFIGURATION / file).read_text()).substitute(values)


@contextlib.contextmanager
def running_cluster(programs: Path) -> Iterator[Cluster]:
    """Start a cluster; its node is ready, and nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="oek-"))
    folder.chmod(0o755)
    bridge = make_bridge("oek", POD_NETWORKS[0])
    ports = _free_ports(("etcd", "peers", "api", "controllers", "scheduler", "kubelet"))
    network = f"{POD_NETWORKS[0]}.{bridge.removeprefix('oek')}"
    node = Node(NODE, folder, bridge, f"{network}.1", network, ports["kubelet"])
    made = Cluster(folder, programs, [node], secrets.token_hex(16), ports)
    try:
        _write_configuration(made)
        _write_node(made, node)
        made.start()
        yield made
    finally:
        _end(made)
        _remove_traces(node)
        subprocess.run(["ip", "link", "delete", bridge], check=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def other_node(made: Cluster, images: Sequence[str]) -> Iterator[Node]:
    """Add another node to a cluster, as if on another machine.

    Args:
        made: The cluster, of one node.
        images: The first node's images that are copied to it.
    """
    first = made.nodes[0]
    name, network = f"{first.bridge}n", first.network.replace(*POD_NETWORKS)
    address = f"{first.network}.250"
    folder = made.folder / OTHER_NODE
    node = Node(OTHER_NODE, folder, name, address, network, made.ports["kubelet"], name)
    folder.mkdir()
    with links.namespace_on(first.bridge, name, address):
        try:
            ip("-n", name, "route", "add", "default", "via", first.address)
            ip("route", "add", f"{network}.0/24", "via", address)
            _write_node(made, node)
            made.nodes.append(node)
            made.start()
            archive = folder / "images.tar"
            first.ctr("images", "export", str(archive), *images)
            node.load(archive)
            yield node
        finally:
            if node in made.nodes:
                made.nodes.remove(node)
            _end_node(made, node)
            made.kubectl("delete", "node", node.name, "--ignore-not-found")
            _remove_traces(node)


def cut(node: Node, *, is_cut: bool = True) -> None:
    """Disconnect another node from the rest, or connect it again."""
    links.cut(str(node.namespace), is_cut=is_cut)


def _write_configuration(made: Cluster) -> None:
    _make_certificates(made.folder, made.address)
    (made.folder / "tokens.csv").write_text(f"{made.token},admin,admin,system:masters\n")
    made.kubeconfig.write_text(_filled(made, "kubeconfig"))


def _write_node(made: Cluster, node: Node) -> None:
    (node.folder / "cni").mkdir()
    places = {"kubelet.yaml": "", "containerd.toml": "", "bridge.conflist": "cni/10-"}
    for file, place in places.items():
        (node.folder / f"{place}{file}").write_text(_filled(made, file, node))


def _make_certificates(folder: Path, address: str) -> None:
    """Make an authority, the API server's certificate, and its client certificate for kubelets."""
    _openssl(folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=openenvd-test",
             "-days", "3", "-keyout", "ca.key", "-out", "ca.crt")  # fmt: skip
    names = f"subjectAltName=IP:127.0.0.1,IP:{address},IP:{SERVICES}.0.1,DNS:kubernetes.default.svc"
    (folder / "names").write_text(names)
    for name, subject in (("server", "/CN=server"), ("client", "/O=system:masters/CN=client")):
        _openssl(folder, "req", "-newkey", "rsa:2048", "-nodes", "-subj", subject,
                 "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt",
                 "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names",
                 "-out", f"{name}.crt")  # fmt: skip


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, capture_output=True, check=True)


def _free_ports(names: tuple[str, ...]) -> dict[str, int]:
    with contextlib.ExitStack() as opened:
        found = {}
        for name in names:
            listener = opened.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            found[name] = int(listener.getsockname()[1])
        return found


def _end(made: Cluster) -> None:
    """Stop all processes; the runtime ends pods once the kubelet cannot restart them."""
    made._end("device_plugin")
    _end_node(made, made.nodes[0])
    for name in ("scheduler", "controllers", "apiserver", "etcd"):
        made._end(name)


def _end_node(made: Cluster, node: Node) -> None:
    kubelet, containerd = f"kubelet-{node.name}", f"containerd-{node.name}"
    made._end(kubelet)
    running = made.processes.get(containerd)
    if running is not None and running.poll() is None:
        with contextlib.suppress(subprocess.CalledProcessError):
            for task in node.ctr("tasks", "ls", "-q").split():
                node.ctr("tasks", "delete", "--force", task)
            for container in node.ctr("containers", "ls", "-q").split():
                network = _network_of(node, container)
                node.ctr("containers", "delete", container)
                if network is not None and network.startswith("/var/run/netns/cni-"):
                    subprocess.run(["umount", network], capture_output=True, check=False)
                    Path(network).unlink(missing_ok=True)
        made._end(containerd)
    for name in (kubelet, containerd):
        made.processes.pop(name, None)


def _remove_traces(node: Node) -> None:
    """Remove what is not below its folder."""
    background.unmount_below(node.folder)
    for found in (*_CGROUPS.glob(node.bridge), *_CGROUPS.glob(f"*/{node.bridge}")):
        for cgroup, _, _ in os.walk(found, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(cgroup)
    if _LINKS.is_dir():
        for link in _LINKS.iterdir():
            if link.is_symlink() and str(link.readlink()).startswith(f"{node.folder}/"):
                link.unlink()


def _network_of(node: Node, container: str) -> str | None:
    """Return a container's network namespace, which CRI keeps in a folder of the machine."""
    spec = json.loads(node.ctr("containers", "info", container))["Spec"]
    namespaces = (spec.get("linux") or {}).get("namespaces") or ()
    return next((each.get("path") for each in namespaces if each["type"] == "network"), None)
