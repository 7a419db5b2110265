# SPDX-License-Identifier: Apache-2.0
"""The messages of `/ws`: from text, and to text. Observations and states: `serialization.py`.

Parsing is jiter's (through pydantic), and the standard library's where the two differ: for the
error text that clients know, and for what only the latter accepts. A well-formed message passes
with two look-ups; only a malformed one goes through a model, for its list of errors.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import SchemaSerializer, core_schema, from_json

from ..errors import WSErrorCode

to_json = SchemaSerializer(core_schema.any_schema()).to_json  # any value, by its type


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Reset(_Message):
    type: Literal["reset"]
    data: dict[str, Any] = Field(default_factory=dict)


class _Step(_Message):
    type: Literal["step"]
    data: dict[str, Any]


class _State(_Message):
    type: Literal["state"]


class _Close(_Message):
    type: Literal["close"]


class _Mcp(_Message):
    type: Literal["mcp"]
    data: dict[str, Any]


_MODELS: dict[str, type[_Message]] = {
    "reset": _Reset,
    "step": _Step,
    "state": _State,
    "close": _Close,
    "mcp": _Mcp,
}


def decode(text: str | bytes) -> Any:
    """Parse the JSON value in `text`.

    Raises:
        json.JSONDecodeError: the text is not JSON, or is JSON that Python cannot hold: an integer
            of more than 4,300 digits, values nested deeper than the interpreter's limit.
        UnicodeDecodeError: the bytes are not UTF-8.
    """
    try:
        return from_json(text)
    except ValueError:
        plain = text.decode() if isinstance(text, bytes) else text
    try:
        return json.loads(plain)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError, MemoryError) as exc:
        raise json.JSONDecodeError(str(exc), plain, 0) from exc


def encode(value: dict[str, Any]) -> bytes:
    """Write `value` as JSON by pydantic's rules (bytes, dates, enums and models are fine).

    Raises:
        ValueError: something in it has no JSON form.
    """
    return to_json(value)


def mcp_message(response: dict[str, Any]) -> bytes:
    """Write the message of a JSON-RPC response; raises as `encode` does."""
    return b'{"type":"mcp","data":%b}' % encode(response)


def data_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return the `data` of a message whose `type` is one of the five; empty where there is none.

    Raises:
        pydantic.ValidationError: the message is malformed.
    """
    data = message.get("data")
    if type(data) is dict and len(message) == 2 and message["type"] not in ("state", "close"):
        return data
    checked = _MODELS[message["type"]](**message)
    return getattr(checked, "data", {})


def encode_error(value: dict[str, Any]) -> bytes:
    """Write an error as JSON, also where its texts have no UTF-8 (half a surrogate pair)."""
    try:
        return encode(value)
    except ValueError:
        return json.dumps(value, default=str).encode()


def error_frame(message: str, code: WSErrorCode, **details: Any) -> bytes:
    """Make an error frame."""
    return encode_error({"type": "error", "data": {"message": message, "code": code, **details}})


def text_of(exc: BaseException) -> str:
    """Return the text of an exception, of whatever class: it may fail to describe itself."""
    try:
        return str(exc)
    except Exception:
        return type(exc).__name__


def validation_frame(exc: ValidationError) -> bytes:
    """Make an error frame that lists which fields of a message or an action are wrong."""
    return error_frame("Invalid message", WSErrorCode.VALIDATION_ERROR, errors=plain_errors(exc))


def plain_errors(exc: ValidationError) -> list[Any]:
    """Return the errors in `exc`; values without a JSON form become text, or are left out."""
    errors = exc.errors()
    with suppress(ValueError):
        encode({"errors": errors})
        return list(errors)
    with suppress(ValueError):
        return list(json.loads(exc.json()))
    return list(exc.errors(include_input=False, include_context=False))  # half a surrogate pair
