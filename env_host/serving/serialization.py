# SPDX-License-Identifier: Apache-2.0
"""Observations and states as JSON text, in one pass where that says the same as upstream's two.

Upstream dumps a model to Python values, and these to JSON. A model's own serializer, going straight
to JSON, differs only where the class asks for another form in JSON than in Python. So the schema of
each class is read once: where nothing but plain fields is in it, its serializer writes; otherwise,
and whenever it fails, the two passes do.

One difference remains: a model with a serializer for JSON only, *inside a field without a type*.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from ..environment.upstream_types import ObservationForm
from .messages import to_json

Writer = Callable[..., bytes]

_BESIDE = {"reward", "done"}  # of an observation: they stand beside its fields
_BESIDE_OR_NOWHERE = {"reward", "done", "metadata"}
_WORDS: dict[Any, bytes] = {None: b"null", True: b"true", False: b"false"}
_PLAIN = frozenset(
    {"any", "bool", "default", "definition-ref", "definitions", "dict", "enum", "float", "int"}
    | {"function-after", "function-before", "function-wrap", "list", "literal", "model"}
    | {"model-field", "model-fields", "none", "nullable", "str", "tuple", "union"}
)
_NOT_SCHEMAS = frozenset({"cls", "default", "expected", "fields", "members", "metadata"})

_writers: dict[type, Writer | None] = {}


class ObservationWriter:
    """Writes observations in the form that the installed version of upstream's package has."""

    def __init__(self, form: ObservationForm) -> None:
        self._serialize = form.serialize
        self._is_known = form.has_metadata is not None
        self._has_metadata = bool(form.has_metadata)
        self._beside = _BESIDE if form.has_metadata else _BESIDE_OR_NOWHERE

    def message(self, observation: Any) -> bytes:
        """Write the message of an observation; raises what dumping the observation raises."""
        writer = _writer_of(type(observation))
        if writer is not None and self._is_known:
            try:
                return self._in_one_pass(writer, observation)
            except Exception:  # noqa: S110  the two passes say what is wrong, in upstream's words
                pass
        return b'{"type":"observation","data":%b}' % to_json(self._serialize(observation))

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
            b"}}",
        )
        return b"".join(parts)


def state_message(state: Any) -> bytes:
    """Write the message of a state."""
    return b'{"type":"state","data":%b}' % _state_data(state)


def _state_data(state: Any) -> bytes:
    writer = _writer_of(type(state))
    if writer is not None:
        try:
            return writer(state)
        except Exception:  # noqa: S110  as above
            pass
    if hasattr(state, "model_dump"):
        return to_json(state.model_dump())
    return to_json(dict(state) if state else {})


def _writer_of(model: Any) -> Writer | None:
    try:
        return _writers[model]
    except KeyError:
        writer = _writers[model] = _find_writer(model)
        return writer


def _find_writer(model: Any) -> Writer | None:
    if not issubclass(model, BaseModel) or model.model_dump is not BaseModel.model_dump:
        return None
    if not _is_plain(model.__pydantic_core_schema__):
        return None
    writer: Writer = model.__pydantic_serializer__.to_json
    return writer


def _is_plain(schema: Any) -> bool:
    """Tell whether everything in a core schema serializes to JSON as to Python."""
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
