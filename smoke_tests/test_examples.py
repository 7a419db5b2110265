# SPDX-License-Identifier: Apache-2.0
"""The programs in `examples/` run as they are shown."""

import os
import re
import runpy
import subprocess
import sys
import wave
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from .conftest import REPOSITORY, Machine, output_of

EXAMPLES = REPOSITORY / "examples"
TRAINING_SECONDS = 600  # 15 s on an idle processor, most of them for imports; minutes on a busy one


def needs(library: str) -> pytest.MarkDecorator:
    """Skip a test without the library, unless `OPENENVD_TRAINING` says that it must run."""
    is_missing = find_spec(library) is None and "OPENENVD_TRAINING" not in os.environ
    return pytest.mark.skipif(is_missing, reason=f"not installed: {library} (.ci/run training)")


def run(machine: Machine, program: str, *arguments: str, timeout: float = 120) -> str:
    words = (sys.executable, program, *arguments)
    return output_of(*words, cwd=EXAMPLES, env=machine.environ, timeout=timeout)


def test_launch_and_wait_prints_the_address_of_a_ready_environment(machine: Machine) -> None:
    address = run(machine, "launch_and_wait.py", "echo").strip()
    assert address == machine.environment("echo")["address"]


def test_launch_and_wait_names_what_was_wrong(machine: Machine) -> None:
    done = subprocess.run(
        [sys.executable, "launch_and_wait.py", "nothing_of_that_name"],
        cwd=EXAMPLES,
        env=machine.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "nothing_of_that_name" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_class_is_launched_and_episodes_are_collected(machine: Machine) -> None:
    address = run(machine, "launch_and_wait.py", "counter_environment:Counter").strip()
    printed = run(machine, "collect_rollouts.py", address)
    assert printed.splitlines()[-1] == "32 episodes, mean reward 1.00"


def test_a_tree_search_wins_more_games_with_a_larger_budget(machine: Machine) -> None:
    address = run(machine, "launch_and_wait.py", "connect_four:ConnectFour").strip()
    lines = run(machine, "tree_search.py", address, "10").splitlines()
    rates = {line.partition(":")[0]: int(line.split()[-1].rstrip("%")) for line in lines}
    assert list(rates) == ["budget   1", "budget   4", "budget  16"]
    assert rates["budget  16"] >= 80 > rates["budget   1"]


def test_a_policy_is_trained_by_comparing_episodes_of_a_group(machine: Machine) -> None:
    address = run(machine, "launch_and_wait.py", "echo").strip()
    lines = run(machine, "train_grpo.py", address, "12").splitlines()
    rewards = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(rewards) == 12
    assert rewards[0] < 0.55  # the best is 0.8; the mean of the eight messages is 0.45
    assert rewards[-1] > 0.7


@needs("trl")
@pytest.mark.timeout(TRAINING_SECONDS + 200)
def test_trl_trains_on_an_address(machine: Machine) -> None:
    address = run(machine, "launch_and_wait.py", "echo").strip()
    machine.environ["HF_HUB_OFFLINE"] = "1"
    told = run(machine, "train_with_trl.py", address, "2", timeout=TRAINING_SECONDS)
    printed = told.splitlines()
    steps = [line for line in printed if line.startswith("step ")]
    assert [line.partition(":")[0] for line in steps] == ["step 1", "step 2"]
    assert all(0 < float(line.rpartition(" ")[2]) <= 1 for line in steps)
    gradients = re.findall(r"gradient ([\d.]+)", told)
    assert any(
        float(each) > 0 for each in gradients
    )  # rewards differed, so that there is something to learn


@needs("verl")
@pytest.mark.timeout(TRAINING_SECONDS + 200)
def test_a_tool_of_verl_is_a_session(machine: Machine) -> None:
    address = run(machine, "launch_and_wait.py", "echo").strip()
    printed = run(machine, "verl_tool.py", address, timeout=TRAINING_SECONDS)
    assert printed.splitlines()[-1] == "reward 1.5"


async def test_a_tool_of_verl_leaves_no_session_whose_episode_cannot_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """verl is not installed; the test defines the two names that the example imports."""
    base, schemas, closed = ModuleType("base_tool"), ModuleType("schemas"), []
    base.BaseTool = type("BaseTool", (), {"__init__": _keep_config})  # type: ignore[attr-defined]
    schemas.OpenAIFunctionToolSchema = schemas.ToolResponse = object  # type: ignore[attr-defined]
    for name, module in {"base_tool": base, "schemas": schemas}.items():
        monkeypatch.setitem(sys.modules, f"verl.tools.{name}", module)
    for name in ("verl", "verl.tools"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    @asynccontextmanager
    async def session(_address: str) -> AsyncIterator[object]:
        try:
            yield object()  # it has no `reset`
        finally:
            closed.append(True)

    namespace = runpy.run_path(str(EXAMPLES / "verl_tool.py"))
    create = namespace["OpenEnvTool"].create
    monkeypatch.setitem(create.__globals__, "AsyncSession", session)
    tool = namespace["OpenEnvTool"]({"address": "http://nowhere"}, None)
    with pytest.raises(AttributeError, match="reset"):
        await tool.create("one")
    await tool.release("one")
    assert closed == [True]


def _keep_config(self: Any, config: object, _schema: object) -> None:
    self.config = config


@pytest.fixture
def endpoint() -> Iterator[str]:
    command = [sys.executable, "chat_endpoint.py"]
    with subprocess.Popen(command, cwd=EXAMPLES, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def test_a_chat_endpoint_is_the_policy(machine: Machine, endpoint: str, tmp_path: Path) -> None:
    machine.ok("launch", "echo")
    options = ["--policy", f"openai:{endpoint}", "--episodes", "2", "--max-steps", "3"]
    machine.ok("rollout", "echo", *options, "--out", str(tmp_path / "episodes"))
    written = "".join(each.read_text() for each in (tmp_path / "episodes").rglob("*.jsonl"))
    assert [written.count(f'"turn {number}"') > 0 for number in (1, 2, 3, 4)] == [True] * 3 + [
        False
    ]


def test_singers_hear_each_other(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "chord.wav"
    assert run(machine, "sing_together.py", str(path)).startswith("4 voices")
    with wave.open(str(path), "rb") as file:
        rate, sound = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")
    spectrum = np.abs(np.fft.rfft(sound[rate // 2 : -rate // 4]))
    hertz = np.fft.rfftfreq(len(sound[rate // 2 : -rate // 4]), 1 / rate)
    loud = spectrum.max() / 5
    for voice in (220.0, 277.2, 329.6, 440.0):
        assert spectrum[np.abs(hertz - voice) < 3].max() > loud
    assert spectrum[np.abs(hertz - 600) < 50].max() < loud


def test_the_program_for_clusters_runs_on_this_machine(machine: Machine, tmp_path: Path) -> None:
    printed = run(machine, "launch_on_cluster.py", "local", str(tmp_path / "episodes"))
    assert printed.count("READY") == 4
    assert printed.splitlines()[-1].startswith("64 episodes")
    assert machine.status()["environments"] == []
