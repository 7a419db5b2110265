# SPDX-License-Identifier: Apache-2.0
"""The image and the chart of `docs/deploy/`: the daemon and the gateway in the cluster.

A real dockerd builds `docs/deploy/Dockerfile`, on the base image of our tests. Addresses of
services do not answer on this node, so the API server's own address replaces that of its service.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from openenvd import __version__
from openenvd.schema.spec import DEFAULT_BASE

from ..conftest import REPOSITORY, eventually, smoke_cache
from ..engines.docker_engine import DockerEngine, docker_engine
from ..providers.harness import Harness
from ..providers.under_test import SAMPLE_IMAGE
from .cluster import Cluster

DEPLOY = REPOSITORY / "docs" / "deploy"
NAMESPACE = "rl"
CHARTS = "charts"  # the namespace of two releases
IMAGE = f"openenvd:{__version__}"
BUILD_BASE = "openenvd-test-base:1"
VOLUME = Path(__file__).with_name("configuration") / "volume.yaml"


def rendered(cluster: Cluster, *options: str, release: str = "openenvd") -> list[Any]:
    command = [*cluster.command("helm"), "template", release, str(DEPLOY / "chart"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def test_the_charts_values_are_in_what_it_renders(real: Cluster) -> None:
    values = ("storage.className=fast", "settings.OPENENV_KEEP_DAYS=7", "imagePullSecrets={one}")
    found = rendered(real, *(word for each in values for word in ("--set", each)))
    made = {each["kind"]: each["spec"] for each in found if "spec" in each}
    assert made["PersistentVolumeClaim"]["storageClassName"] == "fast"
    spec = made["Deployment"]["template"]["spec"]
    assert spec["imagePullSecrets"] == [{"name": "one"}]
    assert {"name": "OPENENV_KEEP_DAYS", "value": "7"} in spec["containers"][0]["env"]
    lint = [*real.command("helm"), "lint", "--strict", str(DEPLOY / "chart")]
    subprocess.run(lint, capture_output=True, check=True)


@pytest.fixture(scope="module")
def in_cluster(provider: Any, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A node that has the daemon's image, built from its Dockerfile."""
    cluster: Cluster = provider.cluster
    folder = tmp_path_factory.mktemp("image")
    with smoke_cache() as cache, docker_engine(cache) as engine:
        _build(engine, folder)
        engine.docker("save", "--output", str(folder / "image.tar"), IMAGE)
    cluster.load(folder / "image.tar")
    return cluster


def _build(engine: DockerEngine, folder: Path) -> None:
    """Build the image with this machine's settings of the package index."""
    lines = [f"FROM {DEFAULT_BASE}"]
    if certificates := os.environ.get("SSL_CERT_FILE"):
        shutil.copy(certificates, folder / "certificates.pem")
        lines += ["COPY certificates.pem /etc/", "ENV PIP_CERT=/etc/certificates.pem"]
    (folder / "Dockerfile").write_text("\n".join(lines))
    engine.docker("build", "--tag", BUILD_BASE, str(folder))
    given = {"BASE": BUILD_BASE, "PIP_INDEX_URL": os.environ.get("PIP_INDEX_URL")}
    told = [f"--build-arg={name}={value}" for name, value in given.items() if value]
    words = ("--network=host", "--tag", IMAGE, "--file", str(DEPLOY / "Dockerfile"))
    engine.docker("build", *told, *words, str(REPOSITORY))


@pytest.fixture
def volume(in_cluster: Cluster) -> Iterator[Callable[[], None]]:
    names: list[str] = []

    def make() -> None:
        name = f"home-{len(names)}"
        folder = in_cluster.folder / name
        folder.mkdir()
        folder.chmod(0o777)
        volume = VOLUME.read_text().replace("FOLDER", str(folder)).replace("NAME", name)
        in_cluster.kubectl("apply", "--filename=-", stdin=volume)
        names.append(name)

    yield make
    in_cluster.kubectl("delete", "persistentvolume", "--wait=false", *names)
    for name in names:
        shutil.rmtree(in_cluster.folder / name)


@pytest.fixture
def deployed(in_cluster: Cluster, volume: Callable[[], None]) -> Iterator[Cluster]:
    """The rendered chart in a namespace, with a daemon that answers."""
    volume()
    in_cluster.kubectl("create", "namespace", NAMESPACE)
    objects = yaml.safe_dump_all(rendered(in_cluster))
    in_cluster.kubectl("apply", "-n", NAMESPACE, "--filename=-", stdin=objects)
    server = [f"{name}={value}" for name, value in api_server(in_cluster).items()]
    in_cluster.kubectl("set", "env", "-n", NAMESPACE, "deployment/openenvd", *server)
    await_daemon(in_cluster)
    yield in_cluster
    in_cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=90s")


def api_server(cluster: Cluster) -> dict[str, str]:
    return {
        "KUBERNETES_SERVICE_HOST": cluster.address,
        "KUBERNETES_SERVICE_PORT": str(cluster.ports["api"]),
    }


def await_daemon(cluster: Cluster) -> None:
    words = ("rollout", "status", "-n", NAMESPACE, "deployment/openenvd", "--timeout=120s")
    cluster.kubectl(*words)


def openenv(cluster: Cluster, *words: str, name: str = "openenvd", namespace: str = "rl") -> str:
    """Run `openenv WORDS` in the daemon's pod; returns the output."""
    return cluster.kubectl("exec", "-n", namespace, f"deployment/{name}", "--", "openenv", *words)


def launch(cluster: Cluster, *words: str, name: str = "openenvd", namespace: str = "rl") -> str:
    """Launch the sample; return its address at the daemon's pod."""
    told = ("launch", f"docker://{SAMPLE_IMAGE}", "--provider", "kubernetes", "--name", "sample")
    openenv(cluster, *told, *words, name=name, namespace=namespace)
    return address_of(cluster, name=name, namespace=namespace)


def address_of(cluster: Cluster, *, name: str = "openenvd", namespace: str = "rl") -> str:
    found = openenv(cluster, "address", "sample", name=name, namespace=namespace)
    token = found.partition("token=")[2]
    service = json.loads(cluster.kubectl("get", "endpoints", name, "-n", namespace, "-o", "json"))
    [subset] = service["subsets"]
    [pod] = subset["addresses"]
    return f"http://{pod['ip']}:{subset['ports'][0]['port']}/envs/sample?token={token}"


def test_a_daemon_in_the_cluster_runs_environments_there_and_its_next_pod_finds_them(
    deployed: Cluster, harness: Harness
) -> None:
    with harness.session(address=launch(deployed, "--replicas", "2")) as session:
        assert session.ask("life")
    running = deployed.pods("openenvd.environment=sample")
    assert len(running) == 2
    [daemon] = deployed.pods("app.kubernetes.io/name=openenvd")
    deployed.kubectl("delete", "pod", "-n", NAMESPACE, daemon["metadata"]["name"])
    await_daemon(deployed)
    eventually(lambda: '"state": "READY"' in openenv(deployed, "status", "sample", "--json"))
    with harness.session(address=address_of(deployed)) as session:
        assert session.ask("life")
    uids = [[pod["metadata"]["uid"] for pod in pods] for pods in (
        running, deployed.pods("openenvd.environment=sample"))]  # fmt: skip
    assert uids[0] == uids[1]
    openenv(deployed, "down", "sample")
    assert deployed.pods("openenvd.environment=sample") == []


def test_two_releases_in_one_namespace_do_not_meet(
    in_cluster: Cluster, volume: Callable[[], None], harness: Harness
) -> None:
    def helm(*words: str) -> None:
        seen = [*in_cluster.command("helm"), *words, "--namespace", CHARTS]
        done = subprocess.run(seen, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def install(release: str) -> None:
        settings = [f"settings.{name}={value}" for name, value in api_server(in_cluster).items()]
        seen = [word for each in settings for word in ("--set-string", each)]
        chart = ("install", release, str(DEPLOY / "chart"), "--create-namespace")
        helm(*chart, *seen, "--set", "storage.size=1Gi", "--wait", "--timeout=180s")

    releases = ("one", "two")
    for release in releases:
        volume()
        install(release)
    where = {each: {"name": f"{each}-openenvd", "namespace": CHARTS} for each in releases}
    lives = {}
    for release in releases:
        with harness.session(address=launch(in_cluster, **where[release])) as session:
            lives[release] = session.ask("life")
    assert lives["one"] != lives["two"]
    helm("uninstall", "one", "--wait")
    with harness.session(address=address_of(in_cluster, **where["two"])) as session:
        assert session.ask("life") == lives["two"]
    install("one")  # its volume still has its state
    eventually(lambda: '"READY"' in openenv(in_cluster, "status", "--json", **where["one"]))
    with harness.session(address=address_of(in_cluster, **where["one"])) as session:
        assert session.ask("life") == lives["one"]
    for release in releases:
        openenv(in_cluster, "down", "sample", **where[release])
        helm("uninstall", release, "--wait")
    in_cluster.kubectl("delete", "namespace", CHARTS, "--timeout=90s")
