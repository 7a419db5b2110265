# SPDX-License-Identifier: Apache-2.0
"""The body of `POST /v1/requests`: a discriminated union over the registered operations.

There is one model per operation, made from its `Payload`, so that OpenAPI shows every operation
with its fields, and a wrong body is refused with the field's name before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from ...schema.protocol import LEAST_SESSION_MEMORY_MB
from ..errors import Invalid, near_matches
from ..operations import registry
from ..operations.base import MAX_SECONDS, Operation

_SEE = "GET /openapi.json shows every operation"


class Submit(BaseModel):
    """What every operation's request carries beside its payload."""

    model_config = ConfigDict(extra="forbid")

    idempotency_key: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="The same request again with the same key returns the first one.",
    )
    priority: int = Field(0, ge=-100, le=100, description="Higher priorities run earlier.")
    timeout_seconds: float | None = Field(
        None,
        gt=0,
        le=MAX_SECONDS,
        description="Time limit; past it the worker is stopped and the request fails.",
    )
    retry_oom: bool = Field(
        False,
        description="Run again with more memory if it was killed for memory, as attempts allow.",
    )


class Retry(BaseModel):
    """How a request is submitted again."""

    model_config = ConfigDict(extra="forbid")

    memory_mb: int | None = Field(
        None, ge=32, description="Memory limit this time, of what has one in its payload."
    )
    session_memory_mb: int | None = Field(
        None,
        ge=LEAST_SESSION_MEMORY_MB,
        description="Memory limit of each session this time, of a launch.",
    )


def submit_model(operation: type[Operation]) -> type[Submit]:
    """`LaunchRequest` for `launch`: its payload model under the literal name of the operation."""
    fields: dict[str, Any] = {
        "operation": (Literal[operation.name], Field(description=operation.summary)),
        "payload": (operation.Payload, ...),
    }
    name = f"{operation.name.title()}Request"
    return create_model(name, __base__=Submit, __doc__=operation.summary, **fields)


def invalid_of(error: Mapping[str, Any]) -> Invalid:
    """Turn pydantic's first error into a refusal that names the caller's field."""
    context = error.get("ctx") or {}
    match error["type"]:
        case "json_invalid":
            return Invalid(f"the body is not JSON: {context.get('error', error['msg'])}", _SEE)
        case "union_tag_not_found":
            return Invalid("operation: is missing", _SEE, field="operation")
        case "union_tag_invalid":
            return _unknown_operation(str(context.get("tag")))
        case "extra_forbidden" if (unknown := _unknown_field(error["loc"])) is not None:
            return unknown
    field = _field_of(error["loc"])
    why = str(error["msg"]).removeprefix("Value error, ")
    return Invalid(f"{field}: {why}" if field else f"body: {why}", _SEE, field=field)


def _unknown_operation(name: str) -> Invalid:
    known = [operation.name for operation in registry.OPERATIONS]
    near, hint = near_matches(name, known, f"there are {', '.join(known)}")
    return Invalid(f"there is no operation {name!r}", hint, field="operation", near=near)


def _unknown_field(location: Sequence[int | str]) -> Invalid | None:
    """Name what the operation's payload has instead; None: it is no field of a payload."""
    match [str(part) for part in location]:
        case [_, operation, "payload", field]:
            found = next(each for each in registry.OPERATIONS if each.name == operation)
        case _:
            return None
    fields = list(found.Payload.model_fields)
    begin_so = [name for name in fields if name.startswith(f"{field}_")]
    near, hint = near_matches(field, fields, _SEE)
    if begin_so:
        near, hint = begin_so, f"did you mean {' or '.join(begin_so)}?"
    return Invalid(f"{operation} has no option {field!r}", hint, field=field, near=near)


def _field_of(location: Sequence[int | str]) -> str:
    """Name the field at a location that starts with `body` and the operation's name."""
    where, *path = [str(part) for part in location] or [""]
    if where == "body":
        path = [part for part in path[1:] if part != "payload"]
    return ".".join(path)


def submit_union(operations: Iterable[type[Operation]]) -> Any:
    """Make the union of all operations' bodies, discriminated by `operation`."""
    models: Any = reduce(or_, [submit_model(operation) for operation in operations])
    return Annotated[models, Field(discriminator="operation")]
