# SPDX-License-Identifier: Apache-2.0
"""Splits a server's answer without parsing it: the observation stays a piece of text.

One pass over the message finds where the observation begins and ends. Text that only Python accepts
as JSON (`NaN`) is parsed nevertheless, and written again with `null` instead; a reward that is not
a finite number is kept as text.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from ..env_host.errors import WSErrorCode
from .episodes import EMPTY_OBJECT, FailureReason, parse
from .errors import EpisodeFailed
from .session.connection import Message
from .session.session import error_text

PARSED_APART_BYTES = 262_144  # from here on, an observation is parsed in a thread
MAX_ODD_CHARACTERS = 40  # of a reward that is not a number

_REASONS: dict[Any, FailureReason] = {
    WSErrorCode.CAPACITY_REACHED: FailureReason.NO_CAPACITY,
    WSErrorCode.SESSION_ERROR: FailureReason.CONNECTION_LOST,  # the server ended it
    WSErrorCode.VALIDATION_ERROR: FailureReason.INVALID_ACTION,
    WSErrorCode.INVALID_JSON: FailureReason.PROTOCOL_ERROR,
    WSErrorCode.UNKNOWN_TYPE: FailureReason.PROTOCOL_ERROR,
}
# Raised by either parser for invalid text, a wrong type, or nesting that is too deep. All are
# caught, so that one answer cannot end the whole rollout.
_NOT_READABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a reset or a step."""

    observation_json: bytes
    reward: float | None
    done: bool
    metadata_json: bytes = EMPTY_OBJECT
    odd_reward: str | None = None  # the reward, if it is not a finite number

    @property
    def observation(self) -> Any:
        """The observation's value; parsed each time."""
        return parse(self.observation_json)


class _Data(msgspec.Struct):
    """The fields of an observation and of an error, so that one pass reads either."""

    observation: msgspec.Raw = msgspec.Raw(b"null")
    reward: Any = None
    done: bool | None = False
    metadata: msgspec.Raw = msgspec.Raw(EMPTY_OBJECT)
    message: msgspec.Raw = msgspec.Raw(b"null")
    code: msgspec.Raw = msgspec.Raw(b"null")
    errors: msgspec.Raw = msgspec.Raw(b"null")
    exception: msgspec.Raw = msgspec.Raw(b"null")
    place: msgspec.Raw = msgspec.Raw(b"null")


class _Frame(msgspec.Struct):
    type: str
    data: _Data = msgspec.field(default_factory=_Data)
    odd_reward: str | None = None  # from our env host, which writes such a reward as null


_OF_ERRORS = ("code", "message", "errors", "exception", "place")
_decoder = msgspec.json.Decoder(_Frame)


def answer_of(text: Message) -> Answer:
    """Split the text of an answer."""
    try:
        return _taken_apart(text)
    except _NOT_READABLE as exc:
        try:
            frame = json.loads(text)
            data = frame.get("data") if isinstance(frame, dict) else None
            reward = data.pop("reward", None) if isinstance(data, dict) else None
            return _taken_apart(orjson.dumps(frame), reward)
        except _NOT_READABLE:
            start = text[:200].decode("utf-8", "replace")
            message = f"the answer is not OpenEnv's ({exc}): {start}"
            raise EpisodeFailed(FailureReason.PROTOCOL_ERROR, message) from exc


def _taken_apart(text: Message, reward: Any = None) -> Answer:
    frame = _decoder.decode(text)
    data = frame.data
    if frame.type == "observation":
        number, odd = _number(data.reward if reward is None else reward)
        seen, metadata = bytes(data.observation), bytes(data.metadata)
        return Answer(seen, number, bool(data.done), metadata, odd or frame.odd_reward)
    if frame.type == "error":
        said = {name: orjson.loads(bytes(getattr(data, name))) for name in _OF_ERRORS}
        code = None if said["exception"] else said["code"]
        known = _REASONS.get(code) if isinstance(code, str) else None
        raise EpisodeFailed(known or FailureReason.ENVIRONMENT_ERROR, error_text(said))
    message = f"the server answered with a {frame.type!r} frame"
    raise EpisodeFailed(FailureReason.PROTOCOL_ERROR, message)


def _number(reward: Any) -> tuple[float | None, str | None]:
    """Return a finite reward, or the text of another value."""
    if reward is None:
        return None, None
    with suppress(OverflowError):
        if isinstance(reward, float | int) and math.isfinite(reward):
            return float(reward), None
    text = json.dumps(reward)
    return None, text if len(text) <= MAX_ODD_CHARACTERS else f"{text[:MAX_ODD_CHARACTERS]}…"
