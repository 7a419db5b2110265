# SPDX-License-Identifier: Apache-2.0
"""The bundled `benchmark`: says who served it, waits as told, on the loop or on a thread."""

import time
from typing import Any

import pytest

from openenvd.env_host.bundled.benchmark.environment import BenchmarkAction

from ..conftest import StartHost

SERVED = "openenvd.env_host.bundled.benchmark.environment:ServedEnvironment"

both_variants = pytest.mark.parametrize("env", [{}, {"BENCHMARK_SYNC": "1"}], ids=["loop", "sync"])


@both_variants
def test_a_step_waits_as_asked_with_messages_of_the_size_asked_for(
    serve: StartHost, env: dict[str, str]
) -> None:
    with serve(SERVED, env=env).open() as session:
        first = session.ask("reset")["data"]["observation"]
        seen = session.ask("step", {"wait_seconds": 0.05})["data"]["observation"]
        action = {"payload": "y" * 1000, "answer_bytes": 3000}
        sized = session.ask("step", action)["data"]["observation"]
    assert (sized["payload_bytes"], len(sized["payload"])) == (1000, 3000)
    assert seen["waited_seconds"] >= 0.05
    assert seen["step_count"] == 1
    assert seen["session_hash"] == first["session_hash"] != ""
    assert seen["pid"] > 0
    assert abs(seen["timestamp"] - time.time()) < 600


@both_variants
def test_sessions_wait_side_by_side(serve: StartHost, env: dict[str, str]) -> None:
    host = serve(SERVED, env=env, reset_first=False)
    with host.open() as one, host.open() as other:
        one.send("step", {"wait_seconds": 600})
        assert other.ask("step", {"wait_seconds": 0})["data"]["observation"]["step_count"] == 1


@pytest.mark.parametrize(
    "action", [{"wait_seconds": -1}, {"wait_seconds": 1e9}, {"answer_bytes": -1}]
)
def test_an_impossible_wait_is_refused(action: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(action))):
        BenchmarkAction.model_validate(action)


def test_the_variant_is_decided_when_a_host_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at import, which may have been in a process that hosts are forked from."""
    from openenvd.env_host.bundled.benchmark import environment

    assert environment.ServedEnvironment.__name__ == "BenchmarkEnvironment"
    monkeypatch.setenv("BENCHMARK_SYNC", "1")
    assert environment.ServedEnvironment.__name__ == "SyncBenchmarkEnvironment"
