# SPDX-License-Identifier: Apache-2.0
"""The body of `POST /v1/requests`: a discriminated union over the registered operations.

One model per operation, made from its `Payload`, so that OpenAPI shows every operation with its
fields, and a wrong one is refused with the field's name before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from ..operations.base import Operation


class Submit(BaseModel):
    """What every operation's request carries beside its payload."""

    model_config = ConfigDict(extra="forbid")

    idempotency_key: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="A second request with the same key returns the first one.",
    )
    priority: int = Field(0, ge=-100, le=100, description="Higher runs earlier.")
    timeout_seconds: float | None = Field(
        None, gt=0, description="Longest run; past it the worker is ended and the request fails."
    )


def submit_model(operation: type[Operation]) -> type[Submit]:
    """`LaunchRequest` for `launch`: its payload model under the literal name of the operation."""
    fields: dict[str, Any] = {
        "operation": (Literal[operation.name], Field(description=operation.summary)),
        "payload": (operation.Payload, ...),
    }
    name = f"{operation.name.title()}Request"
    return create_model(name, __base__=Submit, __doc__=operation.summary, **fields)


def submit_union(operations: Iterable[type[Operation]]) -> Any:
    """All of them, told apart by `operation`."""
    models: Any = reduce(or_, [submit_model(operation) for operation in operations])
    return Annotated[models, Field(discriminator="operation")]
