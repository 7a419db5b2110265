# SPDX-License-Identifier: Apache-2.0
"""The messages of `/ws`: from text, and to text.

jiter parses (through pydantic), and, where the two differ, the standard library: for the error text
that clients know, and for texts that only the latter accepts. A well-formed message needs only two
look-ups; only a malformed one goes through a model, for its list of errors.

Upstream dumps an observation or a state to Python values, and these to JSON. A model's own
serializer, going straight to JSON, differs only where the class asks for another form in JSON than
in Python. So the schema of each class is read once: where nothing but plain fields is in it, its
serializer writes; otherwise, and whenever it fails, the two passes do. One difference remains: a
model with a serializer for JSON only, *inside a field without a type*.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import SchemaSerializer, core_schema, from_json

from ..environment.instances import Calls, place_of, plain_state
from ..environment.upstream_types import ObservationForm
from ..errors import BranchRefused, NotReset, WSErrorCode

# Writes any value by its type (bytes, dates, enums and models are fine). Raises `ValueError` where
# something has no JSON form.
to_json = SchemaSerializer(core_schema.any_schema()).to_json


Writer = Callable[..., bytes]

_BESIDE = {"reward", "done"}  # fields of an observation that a message has beside the others
_BESIDE_OR_NOWHERE = {"reward", "done", "metadata"}
OBSERVATION = b'{"type":"observation",'  # with which the message of an observation begins
_WORDS: dict[Any, bytes] = {None: b"null", True: b"true", False: b"false"}
_PLAIN = frozenset(
    {"any", "bool", "default", "definition-ref", "definitions", "dict", "enum", "float", "int"}
    | {"function-after", "function-before", "function-wrap", "list", "literal", "model"}
    | {"model-field", "model-fields", "none", "nullable", "str", "tuple", "union"}
)
_NOT_SCHEMAS = frozenset({"cls", "default", "expected", "fields", "members", "metadata"})

_writers: dict[type, Writer | None] = {}

log = logging.getLogger("openenvd.env_host")


# Built at the first malformed message, because building them takes a tenth of a host's import.
_CONFIG = ConfigDict(extra="forbid", defer_build=True)


def _model(**fields: Any) -> type[BaseModel]:
    return create_model("_Message", __config__=_CONFIG, type=(str, ...), **fields)


_MODELS = (
    {kind: _model(data=(dict[str, Any], ...)) for kind in ("step", "mcp", "restore")}
    | {kind: _model(data=(dict[str, Any], {})) for kind in ("reset", "branch", "checkpoint")}
    | {kind: _model() for kind in ("state", "close")}
)


def decode(text: str | bytes) -> Any:
    """Parse the JSON value in `text`.

    Raises `json.JSONDecodeError`: the text is not JSON, or is JSON that Python cannot hold: an
    integer of more than 4,300 digits, values nested deeper than the interpreter's limit;
    `UnicodeDecodeError`: the bytes are not UTF-8.
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


def mcp_message(response: dict[str, Any]) -> bytes:
    """Write the message of a JSON-RPC response; raises as `to_json` does."""
    return b'{"type":"mcp","data":%b}' % to_json(response)


def branch_message(answer: Any) -> bytes:
    """Write the answer to a branch, a checkpoint or a restore, unless it is written already."""
    return answer if isinstance(answer, bytes) else to_json(answer)


def data_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return the `data` of a message of a known `type`, or {}; raises `ValidationError`."""
    data = message.get("data")
    if type(data) is dict and len(message) == 2 and message["type"] not in ("state", "close"):
        return data
    checked = _MODELS[message["type"]](**message)
    return getattr(checked, "data", {})


def encode_error(value: dict[str, Any]) -> bytes:
    """Write an error as JSON, also where its texts have no UTF-8 (half a surrogate pair)."""
    try:
        return to_json(value)
    except ValueError:
        return json.dumps(value, default=str).encode()


def error_frame(message: str, code: WSErrorCode, **details: Any) -> bytes:
    """Make an error frame."""
    return encode_error({"type": "error", "data": {"message": message, "code": code, **details}})


def refusal(kind: Any, exc: Exception, log_fields: dict[str, str], env: Any) -> bytes:
    """Return the error frame for a message whose handling raised `exc`; the session continues."""
    origin = origin_of(exc)
    match exc:
        case ValidationError() if "place" not in origin:  # else a model of the environment's failed
            origin = {}
        case BranchRefused():
            return error_frame(str(exc), exc.code, **exc.details)
        case NotReset():
            return error_frame(str(exc), WSErrorCode.SESSION_NOT_RESET)
        case _:
            log.warning("%s failed", kind, exc_info=exc, extra=log_fields)
    if isinstance(exc, NoObservation):
        code = getattr(inspect.unwrap(getattr(Calls(env), kind)), "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}, " if code else ""
        origin |= {"hint": exc.hint, "place": f"{where}in {type(env).__name__}.{kind}"}
    if isinstance(exc, ValidationError):  # upstream answers either as if the message were invalid
        code, errors = WSErrorCode.VALIDATION_ERROR, plain_errors(exc)
        return error_frame("Invalid message", code, errors=errors, **origin)
    return error_frame(text_of(exc), WSErrorCode.EXECUTION_ERROR, **origin)


def origin_of(exc: BaseException) -> dict[str, str]:
    """Return an exception's class, and the environment's line: `{"exception", "place"?}`."""
    for raised in (exc, exc.__cause__ or exc):  # the env host may have raised `exc` from it
        if place := place_of(traceback.walk_tb(raised.__traceback__)):
            return {"exception": type(raised).__name__, "place": place}
    return {"exception": type(exc.__cause__ or exc).__name__}


def text_of(exc: BaseException) -> str:
    """Return an exception's message, or its class name if `__str__` raises."""
    try:
        return str(exc)
    except Exception:
        return type(exc).__name__


def plain_errors(exc: ValidationError) -> list[Any]:
    """Return the errors in `exc`; values without a JSON form become text, or are left out."""
    errors = exc.errors()
    with suppress(ValueError):
        to_json({"errors": errors})
        return list(errors)
    with suppress(ValueError):
        return list(json.loads(exc.json()))
    return list(exc.errors(include_input=False, include_context=False))  # half a surrogate pair


class NoObservation(AttributeError):
    """A reset or a step has returned something else; the message is upstream's."""

    def __init__(self, returned: Any, error: AttributeError) -> None:
        super().__init__(str(error))
        kind = type(returned).__name__
        self.hint = f"what the environment returned is of type {kind}: return an Observation"


class ObservationWriter:
    """Writes observations in the form that the installed version of upstream's package has."""

    def __init__(self, form: ObservationForm) -> None:
        self._serialize = form.serialize
        self._is_known = form.has_metadata is not None
        self._has_metadata = bool(form.has_metadata)
        self._beside = _BESIDE if form.has_metadata else _BESIDE_OR_NOWHERE

    def message(self, observation: Any) -> bytes:
        """Write the message of an observation; raises what dumping the observation raises."""
        writer = writer_of(type(observation))
        if writer is not None and self._is_known:
            try:
                return self._in_one_pass(writer, observation)
            except Exception:  # noqa: S110  the two passes say what is wrong, in upstream's words
                pass
        try:
            data = self._serialize(observation)
        except AttributeError as exc:
            if isinstance(observation, BaseModel):
                raise
            raise NoObservation(observation, exc) from exc
        odd = _odd_reward(data.get("reward"))
        return b'{"type":"observation","data":%b%b}' % (to_json(data), odd)

    def _in_one_pass(self, writer: Writer, observation: Any) -> bytes:
        metadata = self._has_metadata and observation.metadata
        reward, done = observation.reward, observation.done
        parts = (  # joined once: an observation may be large
            b'{"type":"observation","data":{"observation":',
            writer(observation, exclude=self._beside),
            b',"reward":',
            to_json(reward) if type(reward) is not bool and reward is not None else _WORDS[reward],
            b',"done":',
            _WORDS[done] if type(done) is bool else to_json(done),
            b',"metadata":' + to_json(metadata) if metadata else b"",
            b"}",
            _odd_reward(reward),
            b"}",
        )
        return b"".join(parts)


def _odd_reward(reward: Any) -> bytes:
    """Name a reward that JSON writes as `null`, beside the data, so that rollouts count it."""
    if isinstance(reward, float) and not math.isfinite(reward):
        return b',"odd_reward":"%b"' % json.dumps(reward).encode()
    return b""


def state_message(state: Any) -> bytes:
    """Write the message of a state."""
    writer, data = writer_of(type(state)), None
    if writer is not None:
        with suppress(Exception):  # as above
            data = writer(state)
    if data is None:
        data = to_json(plain_state(state))
    return b'{"type":"state","data":%b}' % data


def writer_of(model: Any) -> Writer | None:
    """Return the function that writes models of a class in one pass; None if two are needed."""
    try:
        return _writers[model]
    except KeyError:
        writer: Writer | None = None
        is_usual = issubclass(model, BaseModel) and model.model_dump is BaseModel.model_dump
        if is_usual and _is_plain(model.__pydantic_core_schema__):
            writer = model.__pydantic_serializer__.to_json
        _writers[model] = writer
        return writer


def _is_plain(schema: Any) -> bool:
    """Return whether everything in a core schema serializes to JSON as to Python."""
    if isinstance(schema, (list, tuple)):
        return all(map(_is_plain, schema))
    if not isinstance(schema, dict):
        return True
    if "serialization" in schema or any(key.startswith("ser_json") for key in map(str, schema)):
        return False
    if schema.get("type", "any") not in _PLAIN:
        return False
    named = schema["fields"].values() if "fields" in schema else ()
    parts = (part for key, part in schema.items() if key not in _NOT_SCHEMAS)
    return all(map(_is_plain, (*named, *parts)))
