# SPDX-License-Identifier: Apache-2.0
"""Which actions are played: given ones, the schema's examples, or random ones that it allows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...rollouts.policies.random_policy import sample

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Actions:
    """Where the actions of a test come from.

    Attributes:
        schema: The JSON schema of an action, as `GET /schema` says it.
        known: Actions to choose from; empty: they are drawn from the schema.
        origin: The words for it in the report.
    """

    schema: Json
    known: Sequence[Json]
    origin: str

    def player(self, seed: object) -> ActionPlayer:
        """Return what draws actions, the same ones for the same seed."""
        return ActionPlayer(self, random.Random(str(seed)))  # noqa: S311  # an action is no secret


@dataclass(frozen=True, slots=True)
class ActionPlayer:
    """Draws one action after another."""

    actions: Actions
    rng: random.Random

    def next(self) -> Json:
        """Draw an action."""
        if self.actions.known:
            return self.rng.choice(self.actions.known)
        drawn: Json = sample(self.actions.schema, self.rng)
        return drawn


def actions_of(schema: Json, given: Sequence[Json]) -> Actions:
    """Choose: what the user has given, or else the examples in the schema, or else random ones.

    An example is one of the model (`model_config = {"json_schema_extra": {"examples": [{…}]}}`).
    """
    if given:
        return Actions(schema, tuple(given), "the given actions")
    if examples := [each for each in schema.get("examples") or [] if isinstance(each, dict)]:
        return Actions(schema, tuple(examples), "the examples of the action's schema")
    return Actions(schema, (), "random actions by the action's schema")
