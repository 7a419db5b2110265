# SPDX-License-Identifier: Apache-2.0
"""What `openenv test` takes for a leak, a blocked loop, a difference, and what it plays."""

from typing import Any

import pytest

from openenvd.schema.operation_options import CHECK_NAMES
from openenvd.server.operations.testing.blocking import Call, judge
from openenvd.server.operations.testing.determinism import differences
from openenvd.server.operations.testing.leaks import growth, largest_fall, left_over
from openenvd.server.operations.testing.protocol import differences as schema_differences
from openenvd.server.operations.testing.run import CHECKS, note_exits
from openenvd.server.operations.testing.subject import CheckResult, Finding, actions_of
from openenvd.system.process.exit_reason import ExitKind, ExitReason

MB = 1_000_000


def test_the_names_of_checks_are_those_that_run() -> None:
    assert tuple(CHECKS) == CHECK_NAMES


@pytest.mark.parametrize(
    ("megabytes", "each"),
    [
        ([50 + n for n in range(11)], 10_000),
        ([50.0] * 11, None),
        ([50 + n * 0.1 for n in range(11)], None),  # a megabyte: the allocator's
        ([50, 54, 57, 59, 60, 60, 60, 60, 60, 60, 60], None),  # a cache that filled
        ([50 + (n % 4) * 3 for n in range(11)], None),  # garbage that is collected
        ([50, 90, *(51 + n for n in range(9))], 10_000),  # one outlier
        # Measured of the brigade's encoders, whose memory stays below 53 MB for ever.
        ([45.0, 45.0, 46.2, 46.8, 45.7, 45.9, 49.0, 49.2, 42.8, 47.5, 51.1], None),
    ],
)
def test_growth_is_what_does_not_stop(megabytes: list[float], each: float | None) -> None:
    found = growth([value * MB for value in megabytes], 100)
    assert found == (None if each is None else pytest.approx(each, rel=0.2))


@pytest.mark.parametrize(
    ("values", "fall"), [([1, 2, 3], 0), ([1, 5, 3, 6], 2), ([7, 5, 6, 1], 6), ([3], 0)]
)
def test_growth_below_the_largest_fall_is_not_seen(values: list[float], fall: float) -> None:
    assert largest_fall(values) == fall


@pytest.mark.parametrize(
    ("counts", "each"),
    [
        ([20 + 10 * n for n in range(11)], 1.0),
        ([20 + n for n in range(11)], 0.1),
        ([20] * 11, 0),
        ([20, 22, 21, 20, 22, 20, 21, 22, 22, 20, 22], 0),  # a pool's threads
        ([20, *[28] * 10], 0),  # once
    ],
)
def test_what_stays_of_each_session_is_counted(counts: list[int], each: float) -> None:
    assert left_over(counts, 10) == pytest.approx(each)


def test_a_call_blocks_when_others_are_answered_after_it() -> None:
    waits = [Call("step", 0.2, 0.002)] * 20
    assert judge(waits) is None
    assert judge([*waits, Call("step", 0.2, 0.19)]) is None  # once: the machine's
    assert judge([Call("step", 0.02, 0.019)] * 20) is None  # too short to matter
    found = judge([*waits, Call("step", 0.2, 0.19), Call("reset", 0.4, 0.39)])
    assert found is not None
    assert "2 of 22 calls blocked the event loop, a reset for 400 ms" in found.found


def test_differences_name_the_step_and_the_field_but_ignored_ones() -> None:
    first: list[dict[str, Any]] = [
        {"observation": {"a": 1, "at": 1.0}},
        {"observation": {"a": 2}, "reward": 0.5},
    ]
    other: list[dict[str, Any]] = [
        {"observation": {"a": 1, "at": 2.0}},
        {"observation": {"a": 3}, "reward": 0.5},
    ]
    none: frozenset[str] = frozenset()
    assert list(differences(first, other, none)) == [(0, "at", "1.0 and 2.0"), (1, "a", "2 and 3")]
    assert list(differences(first, other, frozenset({"at", "a"}))) == []
    assert list(differences(first, first[:1], none)) == [(1, "done", "after 1 or 0 steps")]


def test_actions_are_the_given_ones_else_examples_else_random_and_repeatable() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert actions_of(schema, [{"n": 1}]).player(0)() == {"n": 1}
    assert actions_of({**schema, "examples": [{"n": 2}]}, ()).player(0)() == {"n": 2}
    drawn = [actions_of(schema, ()).player(7) for _ in range(2)]
    one, other = ([player() for _ in range(5)] for player in drawn)
    assert one == other
    assert all(isinstance(action["n"], int) for action in one)


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        ({"text": "x", "count": 1}, None),
        ({"text": "x"}, "count is missing"),
        ({"text": 1, "count": 1}, "text is int, and not string"),
        ({"text": "x", "count": True}, "count is bool, and not integer"),
        ({"text": "x", "count": 1, "more": 1}, "more is not in it"),
    ],
)
def test_an_observation_is_compared_with_its_schema(
    observation: dict[str, object], words: str | None
) -> None:
    schema = {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "reward": {"type": "number"},
        },
        "required": ["text", "count", "reward"],
        "additionalProperties": False,
    }
    assert list(schema_differences(observation, schema)) == ([words] if words else [])


@pytest.mark.parametrize(
    ("check", "kept", "words"),
    [
        ("protocol", ["no schema"], "more memory: openenv test with --memory 600M"),
        ("memory", [], "more memory: openenv test with --memory 600M"),
        ("leaks", [], "it may leak: see with fewer --sessions"),
    ],
)
def test_a_death_for_memory_stands_for_what_was_measured_and_leaves_what_was_found(
    check: str, kept: list[str], words: str
) -> None:
    result = CheckResult(check, findings=[Finding("no schema", "…", "…")], figures={"bytes": 0})
    killed = ExitReason(ExitKind.OOM_KILLED, 7, limit_bytes=300 << 20)
    assert note_exits(result, 1, killed, shares_limit=True)
    death, *others = result.findings
    assert death.remedy.startswith(words)
    assert [each.found for each in others] == kept
    assert result.figures == {}


@pytest.mark.parametrize(("shares", "words"), [(True, "300 MB together"), (False, "its limit was")])
def test_the_limit_of_a_death_is_the_replicas_or_the_sessions_own(shares: bool, words: str) -> None:
    result = CheckResult("protocol")
    killed = ExitReason(ExitKind.OOM_KILLED, 7, limit_bytes=300 << 20)
    note_exits(result, 1, killed, shares_limit=shares)
    assert words in result.findings[0].found
