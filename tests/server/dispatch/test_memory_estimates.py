# SPDX-License-Identifier: Apache-2.0
"""What peaks teach: a pure estimate by table, and what is kept of them."""

from typing import Any

import pytest

from openenvd.requests_db.records import PeakSample, Request
from openenvd.schema.states import RequestState, Schedule
from openenvd.server.dispatch.memory_estimates import (
    MAX_SAMPLES,
    MemoryEstimates,
    estimate,
    left_bytes,
)
from openenvd.server.operations.base import Operation

MB = 2**20


def declaring(schedule: str, expected_bytes: int, leaves_bytes: int = 0) -> type[Operation]:
    fields = {"schedule": schedule, "expected_bytes": expected_bytes, "leaves_bytes": leaves_bytes}
    return type("Declaring", (Operation,), fields)


DECLARED = {"launch": declaring("LONG", 60 * MB), "check": declaring("SHORT", 30 * MB)}


def samples(*peaks: float, killed: bool = False) -> list[PeakSample]:
    return [PeakSample(float(i), int(peak * MB), killed) for i, peak in enumerate(peaks)]


def request(operation: str = "launch", **fields: Any) -> Request:
    payload = fields.pop("payload", {"source": "echo"})
    return Request("id", operation, Schedule.LONG, payload, RequestState.RUNNING, 1.0, **fields)


@pytest.mark.parametrize(
    ("peaks", "expected_mb"),
    [
        ([], 60),  # what the operation declares
        ([100], 115),  # measured, with a margin
        ([100, 100, 200], 230),  # a high one counts
        ([200] + [100] * 19, 115),  # and is forgotten when it does not come again
        ([100] * 19 + [200], 230),  # the latest counts most
        ([100, 100, 100], 104),  # a small margin where all needed the same
        ([100, 100, 96], 108),  # and one as large as their spread
        ([1], 8),  # never less
        ([4000], 1000),  # never more than there is
    ],
)
def test_estimate(peaks: list[float], expected_mb: float) -> None:
    found = estimate(samples(*peaks), default_bytes=60 * MB, most_bytes=1000 * MB)
    assert found == pytest.approx(expected_mb * MB, abs=2)


def test_a_kill_raises_the_estimate_and_samples_count_once_accepted() -> None:
    [killed] = samples(200, killed=True)
    found = estimate([*samples(50, 50), killed], default_bytes=0, most_bytes=1000 * MB)
    assert found == int(200 * 1.5 * MB * 1.15)
    known, peak = MemoryEstimates(DECLARED), int(100 * MB * 1.15)
    learned = known.learned([(request(), samples(100)[0])], 5.0)
    assert known.of(request()) == 60 * MB
    known.accept(learned)
    assert known.of(request()) == known.largest("LONG") == peak
    assert known.largest("SHORT") == 30 * MB
    assert MemoryEstimates(DECLARED, learned).of(request()) == peak


def learn(known: MemoryEstimates, asked: Request, *peaks: float) -> None:
    known.accept(known.learned([(asked, sample) for sample in samples(*peaks)], 5.0))


def test_estimates_differ_by_source_and_typical_is_their_median() -> None:
    known = MemoryEstimates(DECLARED)
    learn(known, request(environment="one"), 300)
    assert known.of(request(environment="two")) == int(300 * MB * 1.15)
    assert known.of(request(payload={"source": "other"})) == 60 * MB
    learn(known, request(), *range(1, 50))
    assert known.peaks_of(request()) == [peak * MB for peak in range(50 - MAX_SAMPLES, 50)]
    known = MemoryEstimates(DECLARED)
    for source, peak in (("a", 50), ("b", 60), ("c", 900)):
        learn(known, request(payload={"source": source}), peak)
    assert known.typical("LONG") == int(60 * MB * 1.15)
    assert known.typical("SHORT") == 30 * MB


@pytest.mark.parametrize(
    ("fields", "expected_mb"),
    [
        ({"payload": {"source": "echo", "memory_mb": 40}}, 60),
        ({"payload": {"source": "echo", "memory_mb": 25}}, 50),  # at most twice its cap
        ({"memory_bytes": 512 * MB}, 512),  # what a retry is given
    ],
)
def test_the_estimate_of_what_has_a_cap(fields: dict[str, Any], expected_mb: int) -> None:
    assert MemoryEstimates(DECLARED).of(request(**fields)) == expected_mb * MB


def test_what_a_launch_leaves_counts_and_few_unknown_sources_start() -> None:
    declared = {"launch": declaring("LONG", 60 * MB, leaves_bytes=40 * MB)}
    known = MemoryEstimates(declared, most_bytes=400 * MB)
    assert known.of(request()) == 100 * MB
    three = request(payload={"source": "echo", "replicas": 3})
    assert [known.of(three, running) // MB for running in (0, 1, 2, 3, 4)] == [180, 140, 100, 0, 0]
    learn(known, request(), 50)
    assert known.of(three) == 3 * known.of(request()) == 3 * int(50 * MB * 1.15)
    known = MemoryEstimates(declared, most_bytes=400 * MB)
    assert known.typical("LONG") == 100 * MB
    assert MemoryEstimates(declared, most_bytes=800 * MB).of(request()) == 200 * MB
    assert MemoryEstimates(declared, most_bytes=2**40).of(request()) == 256 * MB


@pytest.mark.parametrize(
    ("result", "held"),
    [
        (None, 0),
        ({"python": {}}, 0),
        ({"environment": {"name": "echo", "replicas": [{"id": "a"}]}}, 0),
        ({"environment": {"replicas": [{"memory_bytes": 7}, {"memory_bytes": 9}]}}, 9),
    ],
)
def test_left_bytes_are_read_from_a_launchs_result(result: object, held: int) -> None:
    assert left_bytes(result) == held
