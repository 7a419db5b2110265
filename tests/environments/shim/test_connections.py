# SPDX-License-Identifier: Apache-2.0
"""Messages between a shim and its clients, and when a run directory counts as removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from openenvd.environments.shim.connections import DEFAULT_GRACE_SECONDS, error_line, read_operation
from openenvd.environments.shim.files import missing_since
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


def test_a_path_is_missing_since_the_first_look_after_it_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert missing_since(str(path), None, 1.0) == 1.0
    assert missing_since(str(path), 1.0, 2.0) == 1.0
    path.touch()
    assert missing_since(str(path), 1.0, 3.0) is None


def test_a_path_is_missing_only_when_it_is_known_to_be(tmp_path: Path) -> None:
    """A disk that fails for a moment must not be the end of a replica."""
    file = tmp_path / "file"
    file.touch()
    assert missing_since(str(file / "below"), 1.0, 2.0) is None  # ENOTDIR stands for any other
