# SPDX-License-Identifier: Apache-2.0
"""Observations and states are written in one pass where that says the same as upstream's two."""

import datetime as dt
import enum
import json
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_serializer
from pydantic_core import PydanticSerializationError

from openenvd.env_host.environment.interfaces import Observation, State
from openenvd.env_host.environment.upstream_types import ObservationForm, serialize
from openenvd.env_host.serving import messages
from openenvd.env_host.serving.messages import ObservationWriter

NEWEST = ObservationWriter(ObservationForm())


class Color(enum.Enum):
    RED = "red"


class Part(BaseModel):
    name: str = "part"
    weights: list[float] = [0.5, float("inf")]


class Plain(Observation):
    text: str = ""
    part: Part = Field(default_factory=Part)
    parts: dict[str, Part] = Field(default_factory=dict)
    anything: Any = None
    color: Color = Color.RED
    either: int | str | None = None
    type: str = "a field may be called so"


class ForJson(Observation):
    """Its own form in JSON, which upstream's first pass does not ask for."""

    secret: str = "open"

    @field_serializer("secret", when_used="json")
    def hide(self, value: str) -> str:
        return "***"


class Holder(Observation):
    metadata_part: ForJson = Field(default_factory=ForJson)


class Configured(Observation):
    model_config = ConfigDict(ser_json_bytes="base64")
    data: bytes = b"\x00\x01"


class Dated(Observation):
    when: dt.datetime = dt.datetime(2024, 1, 2, tzinfo=dt.UTC)
    price: Decimal = Decimal("0.10")


class OwnDump(Observation):
    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        return {"dumped": True}


def two_passes(observation: Any) -> Any:
    return json.loads(messages.to_json(serialize(observation)))


@pytest.mark.parametrize(
    "observation",
    [
        Observation(),
        Plain(text="€ \U0001f600", done=True, reward=0.1, metadata={"a": [1, None]}),
        Plain(anything={"x": (1, 2), 3: b"abc", "s": {1}}, reward=float("nan")),
        Plain(parts={"a": Part(name="b")}, either="x", reward=2**70),
        Plain(reward=True),
        Plain(reward=1),
        ForJson(),
        Holder(),
        Configured(data=b"abc"),
        Dated(),
        OwnDump(),
    ],
    ids=lambda observation: type(observation).__name__,
)
def test_one_pass_writes_the_same_text_as_two(observation: Observation) -> None:
    assert json.loads(NEWEST.message(observation))["data"] == two_passes(observation)


@pytest.mark.parametrize("of", [Plain, ForJson])
@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), 0.5, None])
def test_a_reward_that_json_cannot_hold_is_named_beside_the_data(
    of: type[Observation], reward: float | None
) -> None:
    message = json.loads(NEWEST.message(of(reward=reward)))
    odd = {"NaN", "-Infinity"} & {str(json.dumps(reward))}
    assert message.get("odd_reward") == (odd.pop() if odd else None)


@pytest.mark.parametrize(
    ("model", "is_plain"),
    [
        (Observation, True),
        (Plain, True),
        (State, True),
        (ForJson, False),
        (Holder, False),
        (Configured, False),
        (Dated, False),
        (OwnDump, False),
        (dict, False),
    ],
)
def test_only_classes_with_nothing_special_are_written_in_one_pass(
    model: type, is_plain: bool
) -> None:
    assert (messages.writer_of(model) is not None) is is_plain


def test_values_without_a_json_form_fail_with_upstreams_message() -> None:
    with pytest.raises(PydanticSerializationError, match="Unable to serialize unknown type"):
        NEWEST.message(Plain(anything=object()))
    with pytest.raises(AttributeError, match="model_dump"):
        NEWEST.message(None)


@pytest.mark.parametrize(
    ("state", "data"),
    [
        (State(episode_id="e", step_count=2), {"episode_id": "e", "step_count": 2}),
        (State.model_validate({"more": 1}), {"episode_id": None, "step_count": 0, "more": 1}),
        ({"here": True}, {"here": True}),
        (None, {}),
    ],
)
def test_a_state_is_its_fields(state: Any, data: dict[str, Any]) -> None:
    assert json.loads(messages.state_message(state))["data"] == data
