# SPDX-License-Identifier: Apache-2.0
"""An environment is updated while it has sessions; a failed update leaves it as it was."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from openenvd.client.session import Session

from ..conftest import Machine, eventually

# Its observations contain its version; a version may wait for a file, or refuse sessions.
VERSIONED = """
import os, time
from openenvd.env_host.bundled.echo.environment import EchoEnvironment

VERSION = os.environ["VERSION"]
print("version", VERSION, flush=True)
while os.path.exists(os.environ.get("WAIT", "")):
    time.sleep(0.02)

class Sample(EchoEnvironment):
    def __init__(self):
        super().__init__()
        if VERSION == "broken":
            raise OSError("no licence")

    def step(self, action, **kwargs):
        observation = super().step(action, **kwargs)
        observation.echoed_message = VERSION
        return observation
"""
Update = Callable[..., list[str]]


@pytest.fixture
def versioned(write_environment: Callable[[str], str]) -> Update:
    """Return the arguments that launch a version of `trial`."""
    source = write_environment(VERSIONED)

    def arguments(version: str, *more: str) -> list[str]:
        return ["launch", source, "--name", "trial", "-e", f"VERSION={version}", *more]

    return arguments


def step(session: Session) -> str:
    """Take a step; returns the version that has answered."""
    return str(session.step({"message": "hello"}).observation["echoed_message"])


@contextmanager
def session(address: str) -> Iterator[Session]:
    with Session(address) as made:
        made.reset()
        yield made


def version_at(address: str) -> str:
    with session(address) as socket:
        return step(socket)


def generations(machine: Machine) -> dict[int, str]:
    """Return the state of each generation of `trial`, by its number."""
    found = machine.status("trial")["environments"][0]["generations"]
    return {each["number"]: each["state"] for each in found}


def replicas(machine: Machine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = machine.environment("trial")["replicas"]
    return found


def run_folders(machine: Machine) -> list[str]:
    return sorted(path.name for path in (machine.home / "run").iterdir())


def is_undisturbed(machine: Machine, before: list[dict[str, Any]]) -> bool:
    """Return whether the replicas are the earlier ones, and nothing else is left."""
    known = [(each["id"], each["pid"], each["restarts"]) for each in before]
    now = [(each["id"], each["pid"], each["restarts"]) for each in replicas(machine)]
    return now == known and run_folders(machine) == sorted(each["id"] for each in before)


def test_another_source_under_the_name_is_an_update_only_if_that_is_said(
    machine: Machine, versioned: Update
) -> None:
    address = machine.ok("launch", "echo", "--name", "trial", "--json").json["environment"]
    refused = machine.run(*versioned("2"))
    assert refused.code == 1, refused.text
    assert "trial runs from another source: echo, not sample_env:Sample" in refused.err
    machine.ok(*versioned("2", "--update"))
    assert version_at(address["address"]) == "2"


def test_an_update_that_fails_its_sessions_changes_nothing(
    machine: Machine, versioned: Update
) -> None:
    address = machine.ok(*versioned("1", "--json")).json["environment"]["address"]
    before = replicas(machine)
    with session(address) as socket:
        failed = machine.run(*versioned("broken", "--replicas", "2"))
        assert failed.code == 1, failed.text
        assert "trial continues with generation 1" in failed.err
        eventually(lambda: generations(machine) == {2: "FAILED", 1: "SERVING"})
        assert step(socket) == "1"
        eventually(lambda: version_at(address) == "1")
    assert is_undisturbed(machine, before)
    why = machine.status("trial")["environments"][0]["generations"][0]["error"]
    assert "sessions of this update would fail: OSError: no licence" in why
    machine.ok(*versioned("3"))
    assert version_at(address) == "3"


@pytest.mark.parametrize("more", [["--replicas", "2"], ["--gateway", "--replicas", "2"]])
def test_new_sessions_get_the_new_version_as_soon_as_the_launch_returns(
    machine: Machine, versioned: Update, more: list[str]
) -> None:
    """Before that, they get the old or the new one: no client is refused, however many connect."""
    address = machine.ok(*versioned("0", *more, "--json")).json["environment"]["address"]
    has_ended = threading.Event()

    def keep_connecting() -> set[str]:
        found = set()
        while not has_ended.is_set():
            found.add(version_at(address))
        return found

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(keep_connecting) for _ in range(4)]
        try:
            for version in ("1", "2"):
                machine.ok(*versioned(version, *more))
                assert {version_at(address) for _ in range(10)} == {version}
        finally:
            has_ended.set()
        assert {version for client in clients for version in client.result()} <= set("012")


def test_the_gateway_runs_while_a_generation_that_is_behind_it_starts_or_drains(
    machine: Machine, versioned: Update, tmp_path: Path
) -> None:
    def gateway() -> dict[str, Any] | None:
        found: dict[str, Any] | None = machine.ok("gateway", "status", "--json").json["gateway"]
        return found

    machine.ok(*versioned("1"))
    (tmp_path / "wait").touch()
    wait = ["-e", f"WAIT={tmp_path / 'wait'}", "--gateway", "--async"]
    update = machine.ok(*versioned("2", *wait)).out.strip()
    eventually(lambda: len(replicas(machine)) == 2)
    for name in ("one", "two"):  # each time the daemon checks whether the gateway is wanted
        machine.ok("launch", "echo", "--name", name)
    found = gateway()
    assert found is not None
    assert found["state"] == "READY"
    (tmp_path / "wait").unlink()
    machine.ok("wait", update)
    with session(machine.environment("trial")["address"]) as first:
        assert step(first) == "2"
        own = machine.ok(*versioned("3", "--json")).json["environment"]["address"]
        machine.ok("down", "one")
        assert version_at(own) == "3"
        assert step(first) == "2"
    eventually(lambda: generations(machine) == {3: "SERVING", 2: "RETIRED", 1: "RETIRED"})
    eventually(lambda: gateway() is None)


def test_a_watched_folder_is_updated_at_each_change_and_a_session_keeps_its_version(
    machine: Machine, tmp_path: Path
) -> None:
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "openenv.yaml").write_text("name: trial\nclass: sample:Sample\n")

    def write_version(version: str) -> None:
        text = VERSIONED.replace('os.environ["VERSION"]', repr(version))
        (folder / "sample.py").write_text(text)

    write_version("one")
    watch = machine.start("launch", str(folder), "--watch")
    assert watch.stderr is not None
    lines = watch.stderr

    def read_to(text: str) -> None:
        while text not in (line := lines.readline()):
            assert line, f"the command has ended before it printed {text!r}"

    read_to("watching")
    address = machine.environment("trial")["address"]
    with session(address) as before:
        (folder / "server.log").write_text("written by its server")
        write_version("two")
        read_to("sample.py changed")
        read_to("watching")
        assert (step(before), version_at(address)) == ("one", "two")
    (folder / "sample.py").write_text("no Python")
    read_to("trial continues with generation 2")
    read_to("watching")
    write_version("three")
    read_to("watching")
    assert version_at(address) == "three"
    watch.send_signal(signal.SIGINT)
    assert watch.wait(30) == 130
    assert version_at(address) == "three"


@pytest.mark.parametrize("arguments", [["echo"], ["x:Y", "--async"], ["docker://x"]])
def test_what_cannot_be_watched_is_refused(machine: Machine, arguments: list[str]) -> None:
    refused = machine.run("launch", "--watch", *arguments)
    assert refused.code == 2
    assert "--watch" in refused.text
