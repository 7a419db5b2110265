# SPDX-License-Identifier: Apache-2.0
"""What an operation is: a payload model, a schedule, an expected memory, and `run`.

The daemon's HTTP edge reads the class (payload, schedule, …); only a worker calls `run`, in its
own process, with the payload as JSON and an `OperationContext` as its only way out.
Anything `run` prints goes to the request's log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, model_validator

MAX_SECONDS = 30 * 86_400.0  # of any time limit; much more does not fit the kernel's timers
MAX_TEXT = 4096  # characters of a path or a name; a path of Linux has no more bytes


class Payload(BaseModel):
    """Base of every operation's payload: unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, data: Any) -> Any:
        """JSON can spell half of a surrogate pair, which nothing below can write down."""
        try:
            json.dumps(data, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as exc:
            raise ValueError("there is text in it that is not Unicode") from exc
        return data


@dataclass(frozen=True, slots=True)
class OperationContext:
    """What a running operation is given.

    `progress` reports a JSON object (a worker's pipe to the daemon; never blocks for long).
    Cancellation arrives as `executor.TaskCancelled` raised in the worker's main thread.
    """

    request_id: str
    home: Path  # OPENENV_HOME
    progress: Callable[[dict[str, Any]], None]


class Operation(Protocol):
    """One operation: a class with these attributes and a static `run`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    schedule: ClassVar[str]  # LONG or SHORT
    idempotent: ClassVar[bool]  # may be run again after a lost daemon
    max_attempts: ClassVar[int]
    expected_bytes: ClassVar[int]  # until it has been measured
    leaves_bytes: ClassVar[int]  # what each replica that it starts needs beside the worker
    Payload: ClassVar[type[Payload]]

    @staticmethod
    def run(payload: Any, context: OperationContext) -> Any: ...


def say(text: str) -> None:
    """A line for people, in the request's log at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
