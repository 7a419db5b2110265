# SPDX-License-Identifier: Apache-2.0
"""Messages between a shim and its clients, and when a run directory counts as removed."""

from __future__ import annotations

import pytest

from openenvd.environments.shim.connections import DEFAULT_GRACE_SECONDS, error_line, read_operation
from openenvd.environments.shim.files import REMOVED_SECONDS, RunDirectoryWatch
from openenvd.system.text.json_lines import decode_line


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


NOW = 1000.0


def test_a_home_missing_at_one_look_alone_is_not_removed() -> None:
    home = RunDirectoryWatch()
    seen = [(0.0, True), (REMOVED_SECONDS, False), (2 * REMOVED_SECONDS, True)]
    looks = [(home.look(NOW + at, is_missing=missing), home.is_missing) for at, missing in seen]
    assert looks == [(False, True), (False, False), (False, True)]


def test_a_home_that_stays_missing_is_gone() -> None:
    home = RunDirectoryWatch()
    assert not home.look(NOW, is_missing=True)
    assert not home.look(NOW + REMOVED_SECONDS / 2, is_missing=True)
    assert home.look(NOW + REMOVED_SECONDS, is_missing=True)
