# SPDX-License-Identifier: Apache-2.0
"""`scale` and `restart`: other replicas for an environment that runs, at the same address.

Both are carried out by the daemon itself (`server/reconcile/changes.py`).
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from ...schema.operation_options import DrainOptions
from ...schema.spec import MAX_REPLICAS
from ...system.text.units import MB
from . import base


class ChangePayload(base.payload_of(DrainOptions)):  # type: ignore[misc]  # made at run time
    """The environment, and how its replicas are taken away."""

    name: str = Field(min_length=1, description="The environment's name.")
    reason: str | None = Field(
        None, max_length=base.MAX_TEXT, description="Why, for the history; the daemon says it."
    )


class RestartPayload(ChangePayload):
    """The environment, and which of its replicas are replaced."""

    replica: int | None = Field(
        None, ge=0, description="The number of the one replica to restart; by default all."
    )
    together: list[int] = Field(
        [],
        max_length=MAX_REPLICAS,
        description="Numbers of replicas to restart in one go, as they end by themselves soon.",
    )
    max_surge: int = Field(
        1, ge=0, le=MAX_REPLICAS, description="How many more replicas there may be meanwhile."
    )
    max_unavailable: int = Field(
        0, ge=0, le=MAX_REPLICAS, description="How many replicas may be missing meanwhile."
    )

    @model_validator(mode="after")
    def _can_begin(self) -> Self:
        if not self.max_surge and not self.max_unavailable:
            raise ValueError("max_surge: nothing could be replaced unless max_unavailable is more")
        return self


class ScalePayload(ChangePayload):
    """The environment, and how many replicas it is to have."""

    replicas: int = Field(description="How many replicas it is to have.")

    @field_validator("replicas")
    @classmethod
    def _possible(cls, value: int) -> int:
        if value < 1:
            raise ValueError(f"{value} replicas would serve nobody; `openenv down` stops it")
        if value > MAX_REPLICAS:
            raise ValueError(
                f"{value} replicas are more than the {MAX_REPLICAS} of one environment"
            )
        return value


class Scale(base.Operation):
    """Gives one environment more replicas, or fewer."""

    name = "scale"
    summary = "Change how many replicas an environment has."
    schedule = "LONG"
    leaves_bytes = 40 * MB
    in_daemon = True
    Payload = ScalePayload


class Restart(base.Operation):
    """Replaces the replicas of one environment, one after another."""

    name = "restart"
    summary = "Replace an environment's replicas, without ending a session."
    schedule = "LONG"
    leaves_bytes = 40 * MB
    in_daemon = True
    Payload = RestartPayload
