# SPDX-License-Identifier: Apache-2.0
"""Which engine is asked is decided at a launch, and not by whoever starts its agent again."""

import hashlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments import run_files
from openenvd.environments.agent_client import EngineAddress, ask_agent
from openenvd.environments.engines.docker.options import docker_address
from openenvd.environments.engines.providers import provider_named
from openenvd.environments.shim.client import ShimClient
from openenvd.environments.sources.program import ContainerImage
from openenvd.schema.errors import EngineFailed
from openenvd.schema.layout import Layout
from openenvd.schema.spec import EnvironmentSpec

from ..conftest import agents_of

SECONDS = 30.0
USUAL = {
    "DOCKER_HOST": "unix:///var/run/docker.sock",
    "DOCKER_TLS_VERIFY": "",
    "DOCKER_CERT_PATH": "",
}


@pytest.fixture
def no_agent(layout: Layout) -> Iterator[None]:
    """No agent of this home runs afterwards."""
    yield
    for process in agents_of(layout.home):
        process.kill()


def make_context(folder: Path, name: str, host: str, **endpoint: Any) -> str:
    """A context as `docker context create` writes it; its digest."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    path = folder / "contexts" / "meta" / digest / "meta.json"
    path.parent.mkdir(parents=True)
    meta = {"Name": name, "Endpoints": {"docker": {"Host": host, **endpoint}}}
    path.write_text(json.dumps(meta))
    return digest


def test_docker_is_where_its_command_finds_it_and_no_unknown_context(tmp_path: Path) -> None:
    config = {"DOCKER_CONFIG": str(tmp_path)}
    assert docker_address(config) == USUAL
    make_context(tmp_path, "one", "unix:///one.sock")
    make_context(tmp_path, "two", "unix:///two.sock")
    (tmp_path / "config.json").write_text('{"currentContext": "one"}')
    assert docker_address(config)["DOCKER_HOST"] == "unix:///one.sock"
    named = {**config, "DOCKER_CONTEXT": "two"}
    assert docker_address(named)["DOCKER_HOST"] == "unix:///two.sock"
    assert docker_address({**config, "DOCKER_CONTEXT": "default"}) == USUAL
    host = {**named, "DOCKER_HOST": "tcp://three:2376", "DOCKER_CERT_PATH": "/certs"}
    assert docker_address(host) == {
        "DOCKER_HOST": "tcp://three:2376",
        "DOCKER_TLS_VERIFY": "",
        "DOCKER_CERT_PATH": "/certs",
    }
    environ = {"DOCKER_CONFIG": str(tmp_path), "DOCKER_CONTEXT": "nowhere"}
    with pytest.raises(EngineFailed, match="no context 'nowhere'"):
        docker_address(environ)


@pytest.mark.parametrize(("skip", "verify"), [(False, "1"), (True, "")])
def test_a_context_brings_its_certificates(tmp_path: Path, skip: bool, verify: str) -> None:
    digest = make_context(tmp_path, "far", "tcp://far:2376", SkipTLSVerify=skip)
    certificates = tmp_path / "contexts" / "tls" / digest / "docker"
    certificates.mkdir(parents=True)
    found = docker_address({"DOCKER_CONFIG": str(tmp_path), "DOCKER_CONTEXT": "far"})
    assert (found["DOCKER_CERT_PATH"], found["DOCKER_TLS_VERIFY"]) == (str(certificates), verify)
    assert docker_address(found) == found


def test_a_replica_is_asked_for_where_it_was_launched_whoever_starts_the_next_agent(
    home: Path, layout: Layout, no_agent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/launch.sock")
    spec = EnvironmentSpec("sample", "docker://image:1", provider="docker")
    image = ContainerImage("image:1", "image:1")
    provider_named("docker", home).start(spec, image, launch_id=secrets.token_hex(8))
    [run_file] = run_files.all_of(layout.runs)
    for process in agents_of(home):
        process.kill()
        process.wait(SECONDS)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/other.sock")
    run_files.revive(run_file)
    with ShimClient.connect(run_file.socket_path) as client:
        status = client.wait(lambda status: status["problem"] is not None, SECONDS)
    assert "unix:///nowhere/launch.sock" in str(status["problem"])
    other = EngineAddress.of("docker", {**USUAL, "DOCKER_HOST": "unix:///nowhere/other.sock"})
    with pytest.raises(EngineFailed, match="no replica of"):
        ask_agent(layout, other, "adopt", run_dir=str(run_file.run_dir))
