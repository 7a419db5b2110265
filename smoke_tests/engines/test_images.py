# SPDX-License-Identifier: Apache-2.0
"""Images of environments, built by a real Docker engine, and used without openenvd around them."""

from collections.abc import Callable
from pathlib import Path

from ..background import answers
from ..conftest import Machine, eventually
from ..test_main_job import say_hello as speak_to
from .docker_engine import DockerEngine

SAMPLE = """
from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State
from pydantic import Field

class Say(Action):
    message: str = ""

class Said(Observation):
    echoed_message: str = ""

class Sample(Environment[Say, Said, State]):
    def reset(self, seed=None, episode_id=None, **more):
        return Said()
    def step(self, action, **more):
        return Said(echoed_message=action.message)
    @property
    def state(self):
        return State()
"""


def say_hello(engine: DockerEngine, image: str) -> None:
    """Start the image as any other, and open a session."""
    engine.docker("run", "--detach", "--name", "sample", "--publish", "127.0.0.1::8000", image)
    address = f"http://{engine.docker('port', 'sample', '8000/tcp')}"
    eventually(lambda: answers(address))
    speak_to(address)


def test_an_image_serves_its_environment_by_itself(
    docker_machine: Machine, docker_engine: DockerEngine
) -> None:
    built = docker_machine.ok("image", "build", "echo", "--tag", "mine/echo:1", "--json").json
    assert built["image"] == "mine/echo:1"
    say_hello(docker_engine, "mine/echo:1")
    docker_engine.docker("stop", "--time", "10", "sample")
    state = docker_engine.docker("inspect", "--format", "{{.State.ExitCode}}", "sample")
    assert state == "0"


def test_the_same_files_make_one_image_and_others_another(
    docker_machine: Machine, write_environment: Callable[[str], str], docker_engine: DockerEngine
) -> None:
    source, folder = write_environment(SAMPLE), docker_machine.home.parent
    first = docker_machine.ok("image", "build", source, "--json", cwd=folder).json
    again = docker_machine.ok("image", "build", source, "--json", cwd=folder)
    assert again.json["image"] == first["image"]
    assert "building" not in again.err
    say_hello(docker_engine, first["image"])
    write_environment(SAMPLE + "\n# changed\n")
    changed = docker_machine.ok("image", "build", source, "--json", cwd=folder).json
    assert changed["image"] != first["image"]


def test_a_project_that_cannot_be_installed_shows_what_uv_said(
    docker_machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / "openenv.yaml").write_text("name: own\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "own"\nversion = "1"\ndependencies = ["openenvd-no-such-package"]\n'
    )
    answer = docker_machine.run("image", "build", str(tmp_path))
    assert answer.code == 1, answer.text
    assert "openenvd-no-such-package" in answer.err


def test_prune_removes_what_builds_have_left_but_the_newest_image(
    docker_machine: Machine,
    write_environment: Callable[[str], str],
    docker_engine: DockerEngine,
    tmp_path: Path,
) -> None:
    docker_machine.environ["DOCKER_BUILDKIT"] = "0"  # the classic builder names no image of a stage
    built = []
    for version in range(3):
        source = write_environment(f"{SAMPLE}\n# version {version}\n")
        built.append(docker_machine.ok("image", "build", source, "--json", cwd=tmp_path).json)
        if version == 0:
            source = f"docker://{built[0]['image']}"
            docker_machine.ok("launch", source, "--name", "used", "--provider", "docker")
    (tmp_path / "Dockerfile").write_text("FROM python:3.11-slim\nRUN touch /of-somebody-else\n")
    foreign = docker_engine.docker("build", "--quiet", "-", stdin=tmp_path / "Dockerfile")
    unnamed = ("--filter", "dangling=true", "--filter", "label=openenvd.built")
    stages = ("image", "ls", "--quiet", *unnamed)
    assert docker_engine.docker(*stages)
    used, earlier, newest = (each["image"] for each in built)
    removed = docker_machine.ok("prune", "--json").json["images"]
    assert earlier in removed
    assert not {used, newest} & {*removed}
    assert not docker_engine.docker(*stages)
    for image in (used, newest, foreign):
        docker_engine.docker("image", "inspect", image)
    docker_machine.ok("down", "used")
    assert used in docker_machine.ok("prune").out
