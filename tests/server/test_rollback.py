# SPDX-License-Identifier: Apache-2.0
"""Which generation an environment is rolled back to: plain values in, one generation out."""

from __future__ import annotations

import pytest

from openenvd.requests_db.records import Environment, Generation
from openenvd.requests_db.states import EnvironmentState, GenerationState
from openenvd.server.dispatch.rollback import rollback_target
from openenvd.server.errors import Invalid

G = GenerationState
# The newest first; only those with a time have served.
HISTORY = [
    Generation("trial", 5, "5", {}, G.FAILED, 5.0, None, 6.0, "it crashed"),
    Generation("trial", 4, "4", {}, G.SERVING, 4.0, 4.5),
    Generation("trial", 3, "3", {}, G.FAILED, 3.0, None, 3.5, "it crashed"),
    Generation("trial", 2, "2", {}, G.DRAINING, 2.0, 2.5),
    Generation("trial", 1, "1", {}, G.RETIRED, 1.0, 1.5, 2.5),
]


def target(to: int | None, *, serving: int = 4, state: str = "READY") -> int:
    environment = Environment(
        "trial", {}, EnvironmentState(state), 1.0, 1.0, str(serving), generation=serving
    )
    return rollback_target(environment, HISTORY, to).number


@pytest.mark.parametrize(
    ("to", "serving", "state", "number"),
    [
        (None, 4, "READY", 2),  # the third never served
        (None, 2, "DEGRADED", 1),
        (None, 5, "FAILED", 4),
        (1, 4, "READY", 1),
        (2, 4, "READY", 2),
        (4, 4, "FAILED", 4),  # it has served, and does not any more
        (4, 4, "STOPPED", 4),
    ],
)
def test_the_target_is_the_last_that_served_or_the_one_that_was_named(
    to: int | None, serving: int, state: str, number: int
) -> None:
    assert target(to, serving=serving, state=state) == number


@pytest.mark.parametrize(
    ("to", "serving", "why"),
    [
        (None, 1, "has no earlier generation that served"),
        (4, 4, "generation 4 of trial serves already"),
        (3, 4, "generation 3 of trial was never ready"),
        (9, 4, "has no generation 9 in its history"),
    ],
)
def test_what_cannot_be_launched_again_is_refused(to: int | None, serving: int, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        target(to, serving=serving)
