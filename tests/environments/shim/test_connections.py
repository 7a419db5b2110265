# SPDX-License-Identifier: Apache-2.0
"""Messages between a shim and its clients."""

from __future__ import annotations

import json

import pytest

from openenvd.environments.shim.connections import DEFAULT_GRACE_SECONDS, error_line, read_operation
from openenvd.system.text.json_lines import decode_line, encode_line


def test_wire_is_one_json_object_a_line() -> None:
    line = encode_line({"op": "stop", "grace_seconds": 1.5})
    assert line.endswith(b"\n")
    assert decode_line(line) == json.loads(line)
    with pytest.raises(ValueError, match="object"):
        decode_line(b"[]")


@pytest.mark.parametrize(
    ("line", "order"),
    [
        (b'{"op": "stop", "grace_seconds": 2}', ("stop", 2.0)),
        (b'{"op": "stop"}', ("stop", DEFAULT_GRACE_SECONDS)),
        (b'{"op": ["stop"]}', (["stop"], DEFAULT_GRACE_SECONDS)),
        (b"{}", (None, DEFAULT_GRACE_SECONDS)),
    ],
)
def test_an_operation_is_read_with_its_grace(line: bytes, order: tuple[object, float]) -> None:
    assert read_operation(line) == order


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"stop",
        b"\xff",
        b"[1]",
        b'{"op": ' * 9000,
        b'{"grace_seconds": []}',
        b'{"grace_seconds": ' + b"9" * 400 + b"}",
    ],
    ids=["empty", "no JSON", "no text", "no object", "too deep", "no number", "too large"],
)
def test_an_invalid_message_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_operation(line)


def test_an_error_is_an_event() -> None:
    assert decode_line(error_line("unknown op: 1")) == {
        "event": "error",
        "message": "unknown op: 1",
    }
