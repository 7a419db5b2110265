# SPDX-License-Identifier: Apache-2.0
"""`scale` and `restart` change an environment's replicas; `down`, `down_strays`, `prune` free them.

The daemon itself carries out the first three (`server/reconcile/changes.py`). Operations that free
memory are SHORT, so that launches never delay them. Strays are replicas without a record. The
daemon knows which these are (`status`), but a worker does not, so the request names them.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, Field, create_model, field_validator, model_validator

from ...environments.strays import stop_stray
from ...schema.errors import EngineFailed
from ...schema.layout import Layout
from ...schema.operation_options import DrainOptions
from ...schema.spec import MAX_REPLICAS, LaunchOptions, check_room
from ...system.text.units import MB
from . import base

_NAME = "[A-Za-z0-9][A-Za-z0-9_.:-]*"
_ID = f"^{_NAME}(/{_NAME})*$"  # of a pod: NAMESPACE/NAME/UID


class ChangePayload(base.payload_of(DrainOptions)):  # type: ignore[misc]  # made at run time
    """The environment, and how its replicas are taken away."""

    name: str = Field(min_length=1, description="The environment's name.")
    reason: str | None = Field(
        None, max_length=base.MAX_TEXT, description="Why, for the history; the daemon says it."
    )


# By default as its launch says.
_ROOM = base.fields_of(LaunchOptions, only=("max_surge", "max_unavailable"))


class RestartPayload(create_model("Room", __base__=ChangePayload, **_ROOM)):  # type: ignore[misc]
    """The environment, and which of its replicas are replaced."""

    replica: int | None = Field(
        None, ge=0, description="The number of the one replica to restart; by default all."
    )
    together: list[int] = Field(
        [],
        max_length=MAX_REPLICAS,
        description="Numbers of replicas to restart in one go, as they end by themselves soon.",
    )

    _spell = field_validator("max_surge", "max_unavailable", mode="before")(base.spell_number)

    @model_validator(mode="after")
    def _can_begin(self) -> Self:
        check_room(self.max_surge, self.max_unavailable)
        return self


class ScalePayload(ChangePayload):
    """The environment, and how many replicas it is to have."""

    replicas: int = Field(le=MAX_REPLICAS, description="How many replicas it is to have.")

    @field_validator("replicas")
    @classmethod
    def _possible(cls, value: int) -> int:
        if value < 1:
            raise ValueError(f"{value} replicas would serve nobody; `openenv down` stops it")
        return value


class Change(base.Operation):
    """Changes the replicas of an environment; the reconciler carries it out."""

    schedule = "LONG"
    leaves_bytes = 40 * MB
    in_daemon = True


class Scale(Change):
    """Changes the number of replicas of one environment."""

    name = "scale"
    summary = "Change how many replicas an environment has."
    Payload = ScalePayload


class Restart(Change):
    """Replaces the replicas of one environment, one after another."""

    name = "restart"
    summary = "Replace an environment's replicas, without ending a session."
    Payload = RestartPayload


class DownPayload(base.Payload):
    """The environment."""

    name: str = Field(min_length=1, description="The environment's name.")


class Down(base.Operation):
    """Stops one environment; stopping it again is fine."""

    name = "down"
    summary = "Stop an environment and free what it holds."
    in_daemon = True
    Payload = DownPayload


class Stray(BaseModel):
    """One stray, as `status` shows it."""

    provider: str = Field(min_length=1, max_length=64)
    id: str = Field(min_length=1, max_length=256, pattern=_ID)


class DownStraysPayload(base.Payload):
    """The strays to stop."""

    strays: list[Stray] = Field(max_length=1000, description="`provider` and `id` of each.")


class DownStrays(base.Operation):
    """Stops strays; stopping one again is fine."""

    name = "down_strays"
    summary = "Stop replicas that run without a record."
    Payload = DownStraysPayload

    @staticmethod
    def run(payload: DownStraysPayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"stopped": [ids]}`.

        Raises:
            EngineFailed: Some could not be stopped; the others were.
        """
        layout = Layout(context.home)
        stopped, failed = [], []
        for stray in payload.strays:
            try:
                stop_stray(layout, stray.model_dump())
            except EngineFailed as exc:
                failed.append(exc)
                base.say(f"{stray.id} of {stray.provider}: {exc.message}")
                continue
            stopped.append(stray.id)
            base.say(f"stopped {stray.id} of {stray.provider}")
        if failed:
            raise failed[0]
        return {"stopped": stopped}


class Prune(base.Operation):
    """Removes virtual environments and images, which a project's next launch makes again."""

    name = "prune"
    summary = "Remove projects' virtual environments and images that nothing uses."

    @staticmethod
    def run(payload: base.Payload, context: base.OperationContext) -> dict[str, Any]:
        """`{"removed": [{"path", "project", "freed_bytes"}], "images", "freed_bytes"}`.

        `freed_bytes` counts virtual environments only, because images share their layers.
        """
        from ...environments.preparation.image_build import prune_images
        from ...environments.preparation.venv_cleanup import prune

        layout = Layout(context.home)
        removed = prune(layout)
        return {
            "removed": [each.to_json() for each in removed],
            "images": prune_images(layout),
            "freed_bytes": sum(each.freed_bytes for each in removed),
        }
