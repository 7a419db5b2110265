# SPDX-License-Identifier: Apache-2.0
"""What is taken of a collector: once, whatever it takes, and as lost where Ray has lost it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

exceptions: Any = pytest.importorskip("ray.exceptions", reason="Ray is not installed")

from openenvd.operations import ray_collector_driver as driver  # noqa: E402  it imports Ray


@pytest.fixture(autouse=True)
def _collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the collector "c" are numbers."""
    calls = itertools.count()
    take = SimpleNamespace(remote=lambda: next(calls))
    monkeypatch.setattr(driver, "_actors", {"c": SimpleNamespace(take=take)})
    monkeypatch.setattr(driver, "_pending", {})


def answer(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> list[int]:
    """Let `ray.get` return or raise these, one by one; what is asked for."""
    asked: list[int] = []
    following: Iterator[Any] = iter(answers)

    def get(reference: int, *, timeout: float) -> Any:
        asked.append(reference)
        if isinstance(found := next(following), Exception):
            raise found
        return found

    monkeypatch.setattr("ray.get", get)
    return asked


def test_a_call_that_takes_longer_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one beside it would lose what the first one takes."""
    asked = answer(monkeypatch, exceptions.GetTimeoutError(), (["first"], False), ([], True))
    taken: list[Any] = [driver.take("c") for _ in range(3)]
    assert taken == [([], None), (["first"], None), ([], "it has played all")]
    assert asked == [0, 0, 1]


@pytest.mark.parametrize(
    "loss",
    [
        exceptions.ActorDiedError(),
        exceptions.ActorUnschedulableError("its node is gone"),
        exceptions.ObjectLostError("1f", None, ""),
        exceptions.OutOfMemoryError("its node had no memory left"),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_collector_that_ray_has_lost_has_ended(
    monkeypatch: pytest.MonkeyPatch, loss: Exception
) -> None:
    answer(monkeypatch, loss)
    episodes, end = driver.take("c")
    assert episodes == []
    assert str(end).startswith("it was lost: ")
