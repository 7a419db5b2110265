# SPDX-License-Identifier: Apache-2.0
"""The differences between providers: each has a class that implements what the facts need.

To add a provider, add a class here and its name to `PROVIDERS`. A fact that does not apply to a
provider is in `exceptions.yaml`, by the name of the test, with the reason, which the page shows; so
is a known fault, which is removed from there when the test passes.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import psutil
import yaml
from uv import find_uv_bin

from openenvd.environments.engines.base import HOME_LABEL, REPLICA_LABEL
from openenvd.environments.engines.ray.driver import RayDriver
from openenvd.schema.layout import Layout
from openenvd.schema.spec import DEFAULT_BASE

from ..background import frozen
from ..conftest import REPOSITORY, Machine, new_machine, smoke_cache
from ..engines import docker_engine, ray_engine, slurm_engine
from ..engines.docker_engine import DockerEngine
from ..engines.ray_engine import RayCluster
from ..engines.slurm_engine import SYSTEM_PATH, SlurmCluster
from ..kubernetes import binaries
from ..kubernetes.cluster import Cluster, running_cluster

SAMPLE = Path(__file__).with_name("sample_env.py")
EXCEPTIONS = Path(__file__).with_name("exceptions.yaml")
FOREIGN = "foreign"  # a label
SAMPLE_IMAGE = "openenvd-sample:1"
Json = dict[str, Any]


def _exceptions(kind: str, provider: str) -> dict[str, str]:
    found = yaml.safe_load(EXCEPTIONS.read_text())[kind].get(provider, {})
    return {fact: why for why, facts in found.items() for fact in facts}


class UnderTest:
    """A provider, its engine, and what people do to replicas from outside.

    A method of this class suits processes of this machine, or raises an error: a provider that does
    not override it has the facts that call it in `does_not_apply`.
    """

    name: ClassVar[str]
    gpu_variable: ClassVar[str] = "CUDA_VISIBLE_DEVICES"  # names the GPUs of a replica

    @property
    def does_not_apply(self) -> dict[str, str]:
        """Return why facts do not apply to it, by the names of their tests."""
        return _exceptions("does_not_apply", self.name)

    @property
    def does_not_hold(self) -> dict[str, str]:
        return _exceptions("does_not_hold", self.name)

    def why_not(self) -> str | None:
        """Return why it cannot be tested on this machine, or None."""
        return None

    def engine_version(self) -> str:
        """Return the name and version of its engine, if it can be tested; empty without one."""
        return ""

    def engine(self, folder: Path) -> AbstractContextManager[None]:
        """Run its engine, with files below a temporary folder, while the facts are tested."""
        return nullcontext()

    def variables(self) -> dict[str, str]:
        """Return the variables by which the daemon finds the engine."""
        return {}

    def source(self, folder: Path) -> tuple[str, ...]:
        """Return the arguments of `launch` for the sample environment: source and options."""
        shutil.copy(SAMPLE, folder)
        return ("sample_env:Sample", "--provider", self.name)

    def replicas_of(self, machine: Machine) -> list[str]:
        """Return the replicas of one home that run according to the engine itself."""
        raise NotImplementedError

    def kill(self, machine: Machine, replica: Json, number: signal.Signals) -> None:
        """Send a signal to a replica, which `status` describes, without our own code."""
        os.kill(replica["pid"], number)

    def fake_gpus(self, machine: Machine, count: int) -> list[str]:
        """Give the engine this number of GPUs; return their names in `CUDA_VISIBLE_DEVICES`."""
        devices = [str(4 + number) for number in range(count)]
        machine.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return devices

    def start_foreign(self, name: str, labels: Mapping[str, str]) -> str:
        """Start a foreign instance on the engine; return its id."""
        raise NotImplementedError

    def stop_foreign(self) -> list[str]:
        """Remove the foreign instances; return the ids of those that still ran."""
        raise NotImplementedError

    def remove_all(self, machine: Machine) -> None:
        """Remove the replicas of a home from the engine, without our own code."""
        raise NotImplementedError

    def stop_engine(self) -> None:
        """Stop the engine, as an administrator does."""
        raise NotImplementedError

    def kill_engine(self) -> None:
        """Kill the engine by SIGKILL."""
        raise NotImplementedError

    def hung_engine(self) -> AbstractContextManager[None]:
        """Let the engine accept requests without answering any."""
        raise NotImplementedError

    def start_engine(self) -> None:
        """Start the engine again; return when it answers."""
        raise NotImplementedError


class Local(UnderTest):
    """Processes of this machine."""

    name: ClassVar[str] = "local"

    def replicas_of(self, machine: Machine) -> list[str]:
        running = []
        for process in machine.processes():
            try:
                parent = process.parent()
                if (
                    parent is not None
                    and "shim" in " ".join(parent.cmdline())
                    and process.name() != "envoy"
                ):
                    running.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return running


class Docker(UnderTest):
    """Containers of a Docker engine that belongs to this run."""

    name: ClassVar[str] = "docker"
    is_swarm: ClassVar[bool] = False
    gpu_variable: ClassVar[str] = "NVIDIA_VISIBLE_DEVICES"

    _engine: DockerEngine

    def why_not(self) -> str | None:
        return docker_engine.why_not()

    def engine_version(self) -> str:
        return f"Docker {_version('dockerd', '--version')}"

    @contextmanager
    def engine(self, folder: Path) -> Iterator[None]:
        with smoke_cache() as cache:
            engine = docker_engine.docker_engine(cache, swarm=self.is_swarm, has_base=False)
        with fake_gpu_hook(folder), engine as self._engine:
            with smoke_cache() as cache:  # once for all processes of a run
                archive = _sample_archive(cache)
                if archive.exists():
                    self._engine.docker("load", stdin=archive)
                else:
                    docker_engine.import_base(self._engine, cache)
                    _build_sample(self._engine, folder, archive)
            yield

    def variables(self) -> dict[str, str]:
        return {"DOCKER_HOST": self._engine.host}

    def source(self, folder: Path) -> tuple[str, ...]:
        return (f"docker://{SAMPLE_IMAGE}", "--provider", self.name)

    def replicas_of(self, machine: Machine) -> list[str]:
        label = f"{HOME_LABEL}={Layout(machine.home).home_label}"
        return self._engine.docker("ps", "--quiet", "--filter", f"label={label}").split()

    def kill(self, machine: Machine, replica: Json, number: signal.Signals) -> None:
        label = f"{REPLICA_LABEL}={replica['id']}"
        [container] = self._engine.docker("ps", "--quiet", "--filter", f"label={label}").split()
        self._engine.docker("kill", "--signal", str(int(number)), container)

    def start_foreign(self, name: str, labels: Mapping[str, str]) -> str:
        told = [f"--label={key}={value}" for key, value in {FOREIGN: "", **labels}.items()]
        words = ("run", "--detach", "--name", name, *told, DEFAULT_BASE, "sleep", "600")
        return self._engine.docker(*words)

    def stop_foreign(self) -> list[str]:
        words = ("ps", "--quiet", "--no-trunc", "--filter", f"label={FOREIGN}")
        found = self._engine.docker(*words).split()[::-1]  # Docker lists the newest first
        self._engine.docker("rm", "--force", *found)
        return found

    def remove_all(self, machine: Machine) -> None:
        self._engine.docker("rm", "--force", *self.replicas_of(machine))

    def stop_engine(self) -> None:
        self._engine.stop()

    def kill_engine(self) -> None:
        self._engine.kill()

    def hung_engine(self) -> AbstractContextManager[None]:
        return frozen(self._engine.process.pid)

    def start_engine(self) -> None:
        self._engine.start()


class Swarm(Docker):
    """Services of a swarm of one node that belongs to this run."""

    name: ClassVar[str] = "swarm"
    is_swarm: ClassVar[bool] = True
    gpu_variable: ClassVar[str] = "DOCKER_RESOURCE_NVIDIA-GPU"

    def replicas_of(self, machine: Machine) -> list[str]:
        label = f"label={HOME_LABEL}={Layout(machine.home).home_label}"
        services = self._engine.docker("service", "ls", "--quiet", "--filter", label).split()
        return max(services, super().replicas_of(machine), key=len)

    def start_foreign(self, name: str, labels: Mapping[str, str]) -> str:
        told = [f"--label={key}={value}" for key, value in {FOREIGN: "", **labels}.items()]
        words = ("service", "create", "--detach", "--name", name, *told)
        return self._engine.docker(*words, DEFAULT_BASE, "sleep", "600")

    def stop_foreign(self) -> list[str]:
        words = ("service", "ls", "--filter", f"label={FOREIGN}", "--format", "{{.Name}} {{.ID}}")
        found = sorted(self._engine.docker(*words).splitlines())
        ids = [self._full_id(line.split()[1]) for line in found]
        self._engine.docker("service", "rm", *ids)
        return ids

    def _full_id(self, service: str) -> str:
        return self._engine.docker("service", "inspect", "--format", "{{.ID}}", service)

    def remove_all(self, machine: Machine) -> None:
        label = f"label={HOME_LABEL}={Layout(machine.home).home_label}"
        services = self._engine.docker("service", "ls", "--quiet", "--filter", label).split()
        self._engine.docker("service", "rm", *services)

    def fake_gpus(self, machine: Machine, count: int) -> list[str]:
        devices = [f"GPU-{number}" for number in range(count)]
        named = [f"NVIDIA-GPU={device}" for device in devices]
        self._engine.configure({"node-generic-resources": named})
        return devices


def _sample_archive(cache: Path) -> Path:
    """Return the archive of the sample environment's image, with its base."""
    return cache / f"sample-and-base-{_digest()}.tar"


def _build_sample(engine: DockerEngine, folder: Path, archive: Path) -> None:
    """Build the image of the sample environment, and keep it instead of older ones."""
    shutil.copy(SAMPLE, folder)
    with new_machine(folder / "home") as machine:
        machine.environ["DOCKER_HOST"] = engine.host
        words = ("image", "build", "sample_env:Sample", "--tag", SAMPLE_IMAGE)
        machine.ok(*words, cwd=folder, timeout=300)
    for older in archive.parent.glob("sample-*.tar"):
        older.unlink()
    engine.docker("save", "--output", str(archive), SAMPLE_IMAGE, DEFAULT_BASE)


_START_FOREIGN = """
import json, sys, ray
ray.init(namespace="openenvd", log_to_driver=False)
name, labels = sys.argv[1], json.loads(sys.argv[2])

@ray.remote(num_cpus=0)
class Foreign:
    def answer(self):
        return None

if labels:
    from openenvd.environments.engines.ray import replica as kept
    record = {"name": name, "labels": labels, "actor_name": name}
    kept.write_key(kept.RECORD.format(name), record)
actor = Foreign.options(name=name, lifetime="detached").remote()
ray.get(actor.answer.remote())
"""
_STOP_FOREIGN = """
import sys, ray
ray.init(namespace="openenvd", log_to_driver=False)
from openenvd.environments.engines.ray import replica as kept
for name in sys.argv[1:]:
    kept.delete_key(kept.RECORD.format(name))
    try:
        ray.kill(ray.get_actor(name))
        print(name)
    except ValueError:
        pass
"""


class Ray(UnderTest):
    """Actors of a Ray cluster that belongs to this run; all its nodes are this machine."""

    name: ClassVar[str] = "ray"

    _cluster: RayCluster
    _driver: RayDriver

    def why_not(self) -> str | None:
        return ray_engine.why_not()

    def engine_version(self) -> str:
        return f"Ray {metadata.version('ray')}"

    @contextmanager
    def engine(self, folder: Path) -> Iterator[None]:
        self._foreign: list[str] = []
        with ray_engine.ray_cluster() as self._cluster:
            self._driver = RayDriver({**os.environ, **self.variables()})
            try:
                yield
            finally:
                self._driver.close()

    def variables(self) -> dict[str, str]:
        return self._cluster.environ

    def replicas_of(self, machine: Machine) -> list[str]:
        return [record["name"] for record in self._records(machine)]

    def _records(self, machine: Machine) -> list[Json]:
        home = Layout(machine.home).home_label
        return [
            record
            for record, report, lives in self._driver.call("look")
            if record["labels"].get(HOME_LABEL) == home and lives and not (report or {}).get("exit")
        ]

    def fake_gpus(self, machine: Machine, count: int) -> list[str]:
        if count != self._cluster.gpus:
            self.stop_engine()
            self._cluster.gpus = count
            self.start_engine()
        return [str(number) for number in range(count)]

    def start_foreign(self, name: str, labels: Mapping[str, str]) -> str:
        self._cluster.run(_START_FOREIGN, name, json.dumps(labels))
        self._foreign.append(name)
        return name

    def stop_foreign(self) -> list[str]:
        names, self._foreign = self._foreign, []
        return self._cluster.run(_STOP_FOREIGN, *names).split()

    def remove_all(self, machine: Machine) -> None:
        for record in self._records(machine):
            self._driver.call("destroy", record["name"], record["labels"])

    def stop_engine(self) -> None:
        self._driver.close()
        self._driver = RayDriver({**os.environ, **self.variables()})
        self._cluster.stop()

    def hung_engine(self) -> AbstractContextManager[None]:
        return frozen(self._cluster.gcs.pid)

    def start_engine(self) -> None:
        self._cluster.start()


def _digest() -> str:
    """Return a digest of the known inputs of the sample environment's image."""
    digest = hashlib.sha256()
    for path in sorted([SAMPLE, *(REPOSITORY / "env_host").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@contextmanager
def fake_gpu_hook(folder: Path) -> Iterator[None]:
    """Make a Docker engine behave as if NVIDIA's container toolkit were installed."""
    hook = folder / "bin" / "nvidia-container-runtime-hook"
    hook.parent.mkdir()
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o755)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{hook.parent}{os.pathsep}{path}"
    yield
    os.environ["PATH"] = path


class Slurm(UnderTest):
    """Jobs of a Slurm cluster that belongs to this run; all its nodes are this machine."""

    name: ClassVar[str] = "slurm"

    _cluster: SlurmCluster

    def why_not(self) -> str | None:
        return slurm_engine.why_not()

    def engine_version(self) -> str:
        return f"Slurm {_version('slurmctld', '-V')}"

    @contextmanager
    def engine(self, folder: Path) -> Iterator[None]:
        with slurm_engine.slurm_cluster() as self._cluster:
            yield

    def variables(self) -> dict[str, str]:
        return self._cluster.environ

    def replicas_of(self, machine: Machine) -> list[str]:
        label = Layout(machine.home).home_label
        text = self._cluster.run("squeue", "--noheader", "--format=%i|%k").splitlines()
        return [line.partition("|")[0] for line in text if label in line]

    def fake_gpus(self, machine: Machine, count: int) -> list[str]:
        self._cluster.set_gpus(count)
        return [str(number) for number in range(count)]

    def start_foreign(self, name: str, labels: Mapping[str, str]) -> str:
        comment = json.dumps({FOREIGN: "", **labels})
        words = (f"--job-name={name}", f"--comment={comment}", "--output=/dev/null")
        return self._cluster.run("sbatch", "--parsable", *words, "--wrap=sleep 600")

    def stop_foreign(self) -> list[str]:
        text = self._cluster.run("squeue", "--noheader", "--format=%i|%k").splitlines()
        found = [line.partition("|")[0] for line in text if f'"{FOREIGN}"' in line]
        self._cluster.run("scancel", *found)
        return sorted(found)

    def remove_all(self, machine: Machine) -> None:
        self._cluster.run("scancel", "--full", "--signal=KILL", *self.replicas_of(machine))

    def stop_engine(self) -> None:
        self._cluster.stop_controller()

    def kill_engine(self) -> None:
        self._cluster.stop_controller(signal.SIGKILL)

    def hung_engine(self) -> AbstractContextManager[None]:
        return frozen(self._cluster.processes["slurmctld"].pid)

    def start_engine(self) -> None:
        self._cluster.start_controller()


class Kubernetes(UnderTest):
    """Pods of a real Kubernetes cluster of one node that belongs to this run."""

    name: ClassVar[str] = "kubernetes"
    gpu_variable: ClassVar[str] = "NVIDIA_VISIBLE_DEVICES"

    cluster: Cluster

    def why_not(self) -> str | None:
        with smoke_cache() as cache:
            return binaries.why_not(cache) or docker_engine.why_not()  # which builds its images

    def engine_version(self) -> str:
        return f"Kubernetes {binaries.VERSION.removeprefix('v')}"

    @contextmanager
    def engine(self, folder: Path) -> Iterator[None]:
        with smoke_cache() as cache:
            programs = binaries.folder_in(cache)
            archive = _sample_archive(cache)
            if not archive.exists():
                with docker_engine.docker_engine(cache) as engine:
                    _build_sample(engine, folder, archive)
        with running_cluster(programs) as self.cluster:
            self.cluster.load(archive)
            yield

    def variables(self) -> dict[str, str]:
        return {"KUBECONFIG": str(self.cluster.kubeconfig)}

    def source(self, folder: Path) -> tuple[str, ...]:
        return (f"docker://{SAMPLE_IMAGE}", "--provider", self.name)

    def replicas_of(self, machine: Machine) -> list[str]:
        pods = self.cluster.pods(f"{HOME_LABEL}={Layout(machine.home).home_label}")
        return [str(pod["metadata"]["name"]) for pod in pods if _runs(pod)]

    def kill(self, machine: Machine, replica: Json, number: signal.Signals) -> None:
        [pod] = self.cluster.pods(f"{REPLICA_LABEL}={replica['id']}")
        self.cluster.kill(pod, number)

    def fake_gpus(self, machine: Machine, count: int) -> list[str]:
        self.cluster.set_gpus(count)
        return [f"GPU-{number}" for number in range(count)]

    def start_foreign(self, name: str, labels: Mapping[str, str]) -> str:
        container = {"image": SAMPLE_IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "600"]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {FOREIGN: "", **labels}, "annotations": labels},
            "spec": {"containers": [{"name": "foreign", **container}]},
        }
        words = ("create", "--filename=-", "--output=jsonpath={.metadata.uid}")
        return self.cluster.kubectl(*words, stdin=json.dumps(pod))

    def stop_foreign(self) -> list[str]:
        found = [str(pod["metadata"]["uid"]) for pod in self.cluster.pods(FOREIGN) if _runs(pod)]
        self._delete(FOREIGN)
        return found

    def remove_all(self, machine: Machine) -> None:
        self._delete(f"{HOME_LABEL}={Layout(machine.home).home_label}")

    def _delete(self, selector: str) -> None:
        self.cluster.kubectl("delete", "pods", f"--selector={selector}", "--grace-period=1")

    def stop_engine(self) -> None:
        self.cluster.stop_api()

    def kill_engine(self) -> None:
        self.cluster.stop_api(signal.SIGKILL)

    def hung_engine(self) -> AbstractContextManager[None]:
        return frozen(self.cluster.processes["apiserver"].pid)

    def start_engine(self) -> None:
        self.cluster.start()


def _runs(pod: Json) -> bool:
    is_going = "deletionTimestamp" in pod["metadata"]
    return not is_going and pod["status"]["phase"] in ("Pending", "Running")


def _version(program: str, option: str) -> str:
    """Return the first word with a digit in a program's output."""
    path = shutil.which(program, path=os.pathsep.join([os.environ["PATH"], SYSTEM_PATH]))
    said = subprocess.run([path or program, option], capture_output=True, text=True, check=True)
    return next(word for word in said.stdout.split() if word[0].isdigit()).rstrip(",")


class Toy(Local):
    """The engine of `examples/toy_engine`, installed as another package's."""

    name: ClassVar[str] = "toy"

    _folder: Path

    @contextmanager
    def engine(self, folder: Path) -> Iterator[None]:
        self._folder = folder
        words = [find_uv_bin(), "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
        words += ["--python", sys.executable, "--target", str(folder / "installed")]
        example = shutil.copytree(REPOSITORY / "examples/toy_engine", folder / "toy_engine")
        subprocess.run([*words, str(example)], check=True)
        yield

    def variables(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(self._folder / "installed"),
            "TOY_ENGINE": str(self._folder / "instances"),
        }

    def replicas_of(self, machine: Machine) -> list[str]:
        home = Layout(machine.home).home_label
        found = (self._folder / "instances").glob("*/instance.json")
        return [
            path.parent.name
            for path in found
            if json.loads(path.read_text())["labels"].get(HOME_LABEL) == home
            and len((path.parent / "state").read_text().split()) < 2
        ]

    def start_foreign(self, name: str, labels: Mapping[str, str]) -> str:
        folder = self._folder / "instances" / name
        folder.mkdir(parents=True)
        (folder / "state").touch()
        known = {"id": f"{name}:{FOREIGN}", "labels": labels}
        (folder / "instance.json").write_text(json.dumps(known))
        return name

    def stop_foreign(self) -> list[str]:
        paths = (self._folder / "instances").glob("*/instance.json")
        found = [path.parent for path in sorted(paths) if FOREIGN in path.read_text()]
        for folder in found:
            shutil.rmtree(folder)
        return [folder.name for folder in found]

    def remove_all(self, machine: Machine) -> None:
        for name in self.replicas_of(machine):
            removed = (self._folder / "instances" / name).rename(self._folder / f"removed-{name}")
            os.kill(int((removed / "state").read_text()), signal.SIGKILL)


PROVIDERS: dict[str, type[UnderTest]] = {
    each.name: each for each in (Local, Docker, Swarm, Slurm, Ray, Kubernetes)
}
WITH_EXAMPLE = {**PROVIDERS, Toy.name: Toy}  # the page has no column for it
