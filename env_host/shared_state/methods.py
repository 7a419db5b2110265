# SPDX-License-Identifier: Apache-2.0
"""Which methods of a state may be called, and how; signatures are inspected once.

    class Choir:                                    # what `create_state()` returns
        def mix(self, body: bytes, *, at: int, session: int) -> tuple[dict, bytes]: ...
        async def wait_for_song(self) -> dict: ...
        def session_ended(self, session: int) -> None: ...   # called here, once for each
        def close(self) -> None: ...                         # called here, at the orderly end

Every public method may be called. A parameter named `session` gets the number of the calling
session (an int, never given to two sessions), one named `body` the call's bytes, when it has any.
A method returns None, a JSON value, bytes, or (JSON value, bytes).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .frames import HAS_BODY, HAS_VALUE, Buffer, encode_value

SESSION_ENDED = "session_ended"
CLOSE = "close"
EXPIRED = "expired"  # a failure's type, where the call's time was over; no exception's name
RESERVED = frozenset({SESSION_ENDED, CLOSE})  # never called by a client


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the state that clients may call."""

    function: Callable[..., Any]
    is_async: bool
    takes_session: bool
    takes_body: bool

    def call(self, session: int, value: Any, body: bytes | None) -> Any:
        """Return the result of the method, or an awaitable of it.

        Raises:
            TypeError: The arguments are not what it takes.
        """
        arguments = value if value is not None else {}
        if self.takes_session:
            arguments["session"] = session
        if body is None:
            return self.function(**arguments)
        if not self.takes_body:
            raise TypeError("it takes no bytes: it has no parameter named `body`")
        return self.function(body=body, **arguments)


def methods_of(state: Any) -> dict[str, Method]:
    """Return the methods that clients may call, by name."""
    names = (name for name in dir(type(state)) if not name.startswith("_"))
    found = {name: getattr(state, name) for name in names if name not in RESERVED}
    return {name: _method(found[name]) for name in found if inspect.isroutine(found[name])}


def encode_result(result: Any) -> tuple[bytes, bytes | None, int]:
    """Return a reply's value, body and flags; `TypeError` or `ValueError` if it is not JSON."""
    if result is None:
        return b"", None, 0
    if isinstance(result, Buffer):
        return b"", _flat(result), 0
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Buffer):
        return encode_value(result[0]), _flat(result[1]), HAS_VALUE
    return encode_value(result), None, HAS_VALUE


def decode_result(flags: int, value: Any, body: bytes | None) -> Any:
    """Return what the method returned, from the parts of a reply."""
    if not flags & HAS_BODY:
        return value
    return (value, body) if flags & HAS_VALUE else body


def _method(function: Callable[..., Any]) -> Method:
    parameters = inspect.signature(function).parameters
    return Method(
        function,
        inspect.iscoroutinefunction(function),
        takes_session="session" in parameters,
        takes_body="body" in parameters,
    )


def _flat(body: Buffer) -> bytes:
    return body if type(body) is bytes else bytes(body)
