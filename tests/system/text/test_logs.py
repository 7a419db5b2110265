# SPDX-License-Identifier: Apache-2.0
"""The end of a log, and how it is kept bounded under a writer."""

import os
from pathlib import Path

import pytest

from openenvd.system.files import log_files
from openenvd.system.files.log_files import (
    BUSY_POLL_INTERVAL_SECONDS,
    POLL_INTERVAL_SECONDS,
    keep_newest_half,
    last_lines,
    next_look_seconds,
)


def test_newest_lines_are_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    lines = [f"line {n:06}\n" for n in range(20_000)]
    log.write_text("".join(lines))
    size = keep_newest_half(str(log), 100_000)
    first, *rest = log.read_text().splitlines(keepends=True)
    assert first.startswith("[openenvd: earlier lines were dropped")
    assert rest == lines[-len(rest) :]
    assert size == log.stat().st_size
    assert 49_000 < size < 51_000
    log.write_bytes(b"x\n" * 10_000)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    size = keep_newest_half(str(log), 1000)
    os.write(fd, b"after\n")
    os.close(fd)
    assert log.stat().st_size == size + len("after\n")
    assert last_lines(log, 1) == ["after"]
    log.write_bytes(b"x" * 500_000)
    assert keep_newest_half(str(log), 100_000) < 51_000
    log.write_text("".join(f"{n}\n" for n in range(100)))
    assert last_lines(log, 3) == ["97", "98", "99"]
    assert last_lines(log, 0) == []
    log.write_bytes(b"long line\n\xffshort\n")
    monkeypatch.setattr(log_files, "MAX_TAIL_BYTES", 10)
    assert last_lines(log, 9) == ["\ufffdshort"]
    monkeypatch.setattr(log_files, "MAX_TAIL_BYTES", 4)
    assert last_lines(log, 9) == ["ort"]
    assert last_lines(tmp_path / "none", 5) == []


@pytest.mark.parametrize(
    ("size", "grown", "seconds"),
    [
        (0, 0, POLL_INTERVAL_SECONDS),
        (900, 0, POLL_INTERVAL_SECONDS),
        (100, 100, POLL_INTERVAL_SECONDS),
        (500, 400, BUSY_POLL_INTERVAL_SECONDS),
        (1000, 1, BUSY_POLL_INTERVAL_SECONDS),
        (500, -300, POLL_INTERVAL_SECONDS),
    ],
)
def test_fast_logs_are_looked_at_often(size: int, grown: int, seconds: float) -> None:
    assert next_look_seconds(size, grown, 1000) == seconds
