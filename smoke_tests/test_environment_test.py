# SPDX-License-Identifier: Apache-2.0
"""`openenv test` finds exactly the one fault that each environment has."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import Machine, new_machine

FAULTS = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text())
FEW = ("--sessions", "100", "--steps", "2")
BEGIN = """\
import asyncio, os, random, threading, time
from openenvd.env_host.bundled.echo.environment import EchoEnvironment

KEPT = []

class Sample(EchoEnvironment):
"""
EXITS = """
    def step(self, action, **more):
        if len(action.message) > 5:
            os._exit(3)
        return super().step(action, **more)
"""


@pytest.fixture(scope="module")
def tester(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine for all tests of this file; none of them leaves an environment."""
    with new_machine(tmp_path_factory.mktemp("tester") / "home") as made:
        yield made
        assert made.status()["environments"] == []


def report(tester: Machine, folder: Path, fault: str, *words: str) -> dict[str, Any]:
    (folder / "sample_env.py").write_text(BEGIN + textwrap.indent(textwrap.dedent(fault), "    "))
    answer = tester.run("test", "sample_env:Sample", *FEW, *words, "--json", cwd=folder)
    found: dict[str, Any] = answer.json
    assert answer.code == (0 if found["passed"] else 1), answer.text
    return found


def faults(found: dict[str, Any]) -> dict[str, list[str]]:
    return {
        check["check"]: [finding["found"] for finding in check["findings"]]
        for check in found["checks"]
        if check["findings"]
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FAULTS)
def test_an_environment_with_one_fault_fails_for_it_alone(
    tester: Machine, tmp_path: Path, name: str
) -> None:
    check, words = FAULTS[name]["check"], FAULTS[name]["words"]
    fewer = ("--sessions", "20") if name == "blocking" else ()
    found = report(tester, tmp_path, FAULTS[name]["code"], *fewer)
    assert faults(found).keys() - {"processes"} == {check}, found
    assert words in " ".join(faults(found)[check])
    failed = {each["check"] for each in found["checks"] if each["outcome"] == "failed"}
    assert failed == {check}


@pytest.mark.parametrize("method", ["reset", "step"])
def test_checks_in_which_no_step_succeeds_are_not_tested(
    tester: Machine, tmp_path: Path, method: str
) -> None:
    """Errors were compared with errors; the finding has what the client's error has, once."""
    fault = f"def {method}(self, *_, **__):\n    raise ValueError('board is missing')\n"
    (tmp_path / "sample_env.py").write_text(BEGIN + textwrap.indent(fault, "    "))
    answer = tester.run("test", "sample_env:Sample", *FEW, "--skip", "leaks", cwd=tmp_path)
    lines = answer.out.splitlines()
    found = (
        f"EXECUTION_ERROR: ValueError: board is missing ({tmp_path}/sample_env.py:8, in {method})"
    )
    assert [found in line for line in lines].count(True) == 1, answer.text
    for check in ("memory", "blocking", "determinism", "branching"):
        assert any(
            line.startswith(f"- {check:11}  not tested: no {method} succeeded") for line in lines
        ), answer.text
    assert "step_count" not in answer.text
    assert (answer.code, lines[-1]) == (1, "1 of 2 checks failed")


def test_state_that_sessions_share_in_one_process_alone_is_a_warning(
    tester: Machine, tmp_path: Path
) -> None:
    found = report(
        tester, tmp_path, FAULTS["memory"]["code"], "--skip", "leaks", "--skip", "memory"
    )
    assert found["passed"]
    assert "changes KEPT, which only sessions" in faults(found)["processes"][0]


def test_a_process_that_exits_is_told_of_and_the_other_checks_go_on(
    tester: Machine, tmp_path: Path
) -> None:
    found = report(
        tester, tmp_path, EXITS, "--skip", "leaks", "--skip", "memory", "--skip", "blocking"
    )
    text = " ".join(faults(found)["protocol"])
    assert "a step ended the session" in text
    assert "of the server exited: it exited with code 3" in text
    assert "no session could be opened" not in " ".join(faults(found).get("determinism", []))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("echo", ()),
        ("benchmark", ("--ignore=timestamp", "--ignore=session_hash", "--ignore=waited_seconds")),
        ("brigade", ("--skip=determinism",)),  # its world is shared
    ],
)
def test_a_bundled_environment_passes(tester: Machine, name: str, words: tuple[str, ...]) -> None:
    answer = tester.run("test", name, *FEW, *words)
    assert answer.code == 0, answer.text
    lines = answer.out.splitlines()
    checks = 7 - 2 * (name == "brigade")  # nor could its branches be compared
    assert [line[:1] for line in lines].count("✓") == checks, answer.text
    assert lines[-1] == "passed"


def test_an_upstream_project_passes(tester: Machine, project: Path) -> None:
    answer = tester.run("test", str(project), *FEW)
    assert answer.code == 0, answer.text


def test_an_environment_that_does_not_start_fails_with_its_last_lines(
    tester: Machine, tmp_path: Path
) -> None:
    (tmp_path / "sample_env.py").write_text("import a_module_that_nobody_has\n")
    answer = tester.run("test", "sample_env:Sample", "--json", cwd=tmp_path)
    assert answer.code == 1
    assert answer.json["passed"] is False
    assert "a_module_that_nobody_has" in answer.err
    assert tester.status()["environments"] == []


def test_own_actions_are_played_and_a_name_of_no_check_is_refused(
    tester: Machine, tmp_path: Path
) -> None:
    fault = EXITS.replace("> 5", "!= 2")
    words = ("--action", '{"message": "hi"}', "--action", '{"message": "ho"}')
    found = report(tester, tmp_path, fault, *words, "--skip", "leaks")
    assert (found["passed"], found["actions"]) == (True, "the given actions")
    answer = tester.run("test", "echo", "--skip", "everything")
    assert answer.code == 2
    assert "there are protocol, memory, blocking" in answer.text
