# SPDX-License-Identifier: Apache-2.0
"""The rollout as a worker calls it: cancelled in the middle, with variables, wrongly asked for."""

import asyncio
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from openenvd.environments import run_files
from openenvd.environments.engines.local.provider import LocalProvider
from openenvd.environments.run_files import RunFile
from openenvd.environments.shim.client import read_status_file
from openenvd.environments.sources.program import program_of
from openenvd.environments.sources.resolve import resolve
from openenvd.executor.errors import TaskCancelled
from openenvd.executor.worker import print_traceback
from openenvd.rollouts.errors import AllFailed, OutputUnwritable, PolicyNotFound, RolloutError
from openenvd.rollouts.session.loop_thread import run_on_thread
from openenvd.schema.spec import EnvironmentSpec
from openenvd.server.operations.base import OperationContext
from openenvd.server.operations.rollout import Rollout, RolloutPayload

from ...environments.conftest import Started
from ...rollouts.conftest import Serve, address_of
from ...rollouts.conftest import serve as serve
from ..tracing.conftest import KeptSpans

VARIABLE = "POLICY_SAYS_FOR_TEST"
POLICY = f"""
import os
def act(observation): return {{"what": os.environ["{VARIABLE}"]}}
"""


def context(home: Path) -> OperationContext:
    return OperationContext("1" * 32, home, lambda _: None)


def test_an_address_is_rolled_out_with_the_policys_variables(
    serve: Serve, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "acting.py").write_text(POLICY)
    said = {
        "name": address_of(serve()),
        "out": str(tmp_path / "out"),
        "policy": "acting:act",
        "cwd": str(tmp_path),
        "env": {VARIABLE: "go"},
        "episodes": 5,
    }
    payload = RolloutPayload.model_validate(said)
    before = threading.active_count()
    result = Rollout.run(payload, context(tmp_path))
    assert (result["done"], result["steps"]) == (5, 25)
    assert VARIABLE not in os.environ
    assert threading.active_count() == before  # else the worker could not be used again
    assert "5 episodes are in" in capfd.readouterr().out


def test_a_rollout_that_0_2_0_has_queued_is_played(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "acting.py").write_text(POLICY)
    more = {"policy": "acting:act", "cwd": str(tmp_path), "env": {VARIABLE: "go"}}
    payload = payload_of(tmp_path, name=address_of(serve()), episodes=1, **more).model_dump()
    payload |= {"keep_cached": False, "max_loop_lag_seconds": None}
    assert Rollout.call(payload, "1" * 32, str(tmp_path), lambda _: None)["done"] == 1


def test_a_rollout_tells_its_result_before_the_rest_of_its_traces_is_sent(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    stop = lambda _: told.append("".join(capfd.readouterr()))  # noqa: E731
    monkeypatch.setattr(
        "openenvd.server.operations.rollout.start", lambda: (KeptSpans().provider, "sent")
    )
    monkeypatch.setattr("openenvd.server.operations.rollout.stop", stop)
    (tmp_path / "acting.py").write_text(POLICY)
    more = {"policy": "acting:act", "cwd": str(tmp_path), "env": {VARIABLE: "go"}}
    payload = payload_of(tmp_path, name=address_of(serve()), episodes=1, **more)
    Rollout.run(payload, context(tmp_path))
    assert len(told) == 1
    assert "1 episode is in" in told[0]


def payload_of(folder: Path, **fields: Any) -> RolloutPayload:
    said = {"name": "sample", "out": str(folder / "out"), "policy": "random", "episodes": 20}
    payload: RolloutPayload = RolloutPayload.model_validate({**said, "max_steps": 5, **fields})
    return payload


def launch(home: Path, source: str = "echo", name: str = "sample", **fields: Any) -> RunFile:
    spec = EnvironmentSpec(name=name, source=source, shards=1, **fields)
    program = program_of(spec, resolve(source, home), None)
    launch_id = secrets.token_hex(8)
    provider = LocalProvider("local", home)
    Started(provider.start(spec, program, launch_id=launch_id)).wait()
    [run_file] = run_files.of_environment(home / "run", name)
    return run_file


def kill_shim(run_file: RunFile) -> None:
    status = read_status_file(run_file.run_dir)
    assert status is not None
    found = [psutil.Process(pid) for pid in (status["shim"]["pid"], status["pid"])]
    found[0].kill()
    psutil.wait_procs(found, timeout=30.0)


def test_a_rollout_waits_for_an_environment_that_is_being_restarted(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_file = launch(home)
    kill_shim(run_file)
    restart = threading.Timer(0.5, run_files.revive, [run_file])
    restart.start()
    try:
        result = Rollout.run(payload_of(tmp_path), context(home))
    finally:
        restart.join()
        run_files.stop_environment(home / "run", "sample")
    assert result["there"] == 20
    assert "waiting for sample, which is being started" in capfd.readouterr().out


def test_a_rollout_follows_its_environment_through_a_restart(home: Path, tmp_path: Path) -> None:
    """However long that takes: it is to come back."""
    run_file = launch(home)
    restarts: list[threading.Timer] = []

    def on_progress(_: dict[str, Any]) -> None:
        if not restarts:
            kill_shim(run_file)
            restarts.append(threading.Timer(1.5, run_files.revive, [run_file]))
            restarts[0].start()

    following = OperationContext("1" * 32, home, on_progress)
    payload = payload_of(tmp_path, episodes=5_000, retries=5)
    try:
        result = Rollout.run(payload, following)
    finally:
        restarts[0].join()
        run_files.stop_environment(home / "run", "sample")
    assert result["there"] == 5_000


GROWING = """
from openenvd.env_host.environment.interfaces import Environment, Observation, State


class Growing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()
    held = b""

    def reset(self, **kwargs):
        return Observation()

    def step(self, action):
        self.held += bytes([65]) * (20 << 20)
        return Observation()
"""


def test_a_rollout_that_dies_for_memory_is_out_of_memory_and_names_the_command(
    home: Path, tmp_path: Path
) -> None:
    (home / "growing.py").write_text(GROWING)
    run_file = launch(home, "growing:Growing", memory_mb=250)
    payload = payload_of(tmp_path, episodes=1, max_steps=60, retries=0)
    try:
        with pytest.raises(AllFailed, match=r"for memory at \d+ MB") as caught:
            Rollout.run(payload, context(home))
    finally:
        run_files.stop_environment(home / "run", "sample")
    assert caught.value.kind == "oom_killed"
    assert caught.value.hint == f"openenv retry {run_file.request_id} --memory 500M"


@pytest.fixture
def cancellable() -> Iterator[None]:
    """SIGTERM raises `TaskCancelled` in the main thread, as in a worker."""

    def raise_it(*_: object) -> None:
        raise TaskCancelled

    before = signal.signal(signal.SIGTERM, raise_it)
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("interrupts", [True, False])
def test_cancellation_returns_after_the_event_loop_has_ended(
    interrupts: bool, cancellable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    start = threading.Thread.start
    if not interrupts:  # as a signal does that arrives just before the main thread blocks
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def start_slowly(thread: threading.Thread) -> None:  # the signal arrives meanwhile
        start(thread)
        for _ in range(20):
            time.sleep(0.005)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)

    async def main() -> dict[str, Any]:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # of this thread
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
            ended.append("was not cancelled")
        finally:
            await asyncio.sleep(0.2)
            ended.append("cleaned up")
        return {}

    with pytest.raises(TaskCancelled):
        run_on_thread(main())
    assert ended == ["cleaned up"]
    assert not [t for t in threading.enumerate() if t.name.startswith("rollout")]


def test_an_exception_on_the_event_loop_is_raised(cancellable: None) -> None:
    async def main() -> dict[str, Any]:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        run_on_thread(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"out": "relative"},
        {"cwd": "relative"},
        {"episodes": 0},
        {"concurrency": 0},
        {"format": "csv"},
        {"env": {"A=B": "c"}},
        {"more_names": ["echo"]},
        {"surprise": 1},
        {"policy_timeout_seconds": 0},
        {"group": 1},
    ],
)
def test_a_wrong_payload_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RolloutPayload.model_validate({"name": "echo", "out": "/out", **wrong})


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"advantages": "leave-one", "group": 8}, "did you mean leave-one-out?"),
        ({"advantages": "GRPO", "group": 8}, "did you mean group-normalised?"),
        ({"advantages": "best", "group": 8}, "there are group-normalised, leave-one-out, centred"),
        ({"filters": ["min-step=3"]}, "no filter is called 'min-step': did you mean min-steps"),
        ({"filters": ["min-steps"]}, "the filter min-steps takes a number: min-steps=3"),
        ({"filters": ["min-steps=few"]}, "not min-steps=few"),
        ({"filters": ["max-steps=1.5"]}, "the filter max-steps counts steps"),
        ({"filters": ["max-reward=inf"]}, "takes a number"),
        ({"filters": ["failed=1"]}, "the filter failed takes no value"),
        ({"filters": ["failed", "failed"]}, "the filter failed is asked for twice"),
        ({"filters": ["zero-advantage"]}, "add --group"),
        ({"advantages": "centred"}, "add --group"),
        ({"group": 100}, "256 episodes cannot be divided into groups of 100: ask for 200 or 300"),
        ({"group": 300}, "ask for 300"),
    ],
)
def test_invalid_stages_are_refused_with_the_valid_ones(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RolloutPayload.model_validate({"name": "echo", "out": "/out", **wrong})
    [error] = caught.value.errors()
    assert told in error["msg"]
    assert error["loc"][0] in wrong  # the field is named


def test_episodes_of_a_group_share_a_seed_by_default() -> None:
    said = {"name": "echo", "out": "/out", "group": 8, "filters": ["min-reward=-1.5"]}
    order = RolloutPayload.model_validate(said).run_config({"echo": "http://h:1"}, {})
    assert (order.seed, order.stages.size) == (0, 8)
    record = order.stages.record()
    assert (record["advantages"], record["filters"]) == ("group-normalised", ["min-reward=-1.5"])


@pytest.mark.parametrize(
    "error", [RolloutError("no"), OutputUnwritable("no"), PolicyNotFound("no")]
)
def test_an_error_of_a_rollout_is_reported_without_a_traceback(
    error: RolloutError, capsys: pytest.CaptureFixture[str]
) -> None:
    print_traceback(error)
    assert capsys.readouterr().err == ""
