# SPDX-License-Identifier: Apache-2.0
"""The end of a log, and how it is kept bounded under a writer."""

import os
from pathlib import Path

import pytest

from openenvd.system.files import log_files
from openenvd.system.files.log_files import (
    BUSY_POLL_INTERVAL_SECONDS,
    POLL_INTERVAL_SECONDS,
    TIMES_SUFFIX,
    BoundedLog,
    keep_newest_half,
    last_lines,
    next_look_seconds,
    offset_since,
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


def test_the_lines_since_a_time_are_found_by_marks(tmp_path: Path) -> None:
    """Marks record the times of the last writes, also after the log was cut."""
    path = tmp_path / "log"
    path.touch(mode=0o600)
    log = BoundedLog(str(path), 10_000)

    def printed(text: str, at: float) -> None:
        with path.open("a") as file:
            file.write(text)
        os.utime(path, (at, at))
        log.bound()

    def since(at: float) -> str:
        return path.read_text()[offset_since(path, at) :]

    assert since(0) == ""
    printed("one\n", 1000)
    printed("two\nhal", 1100)
    printed("f\n", 1102)  # soon after a mark
    printed("three\n", 1200)
    assert since(999) == since(1000) == "one\ntwo\nhalf\nthree\n"
    assert since(1050) == "two\nhalf\nthree\n"
    assert since(1150) == "half\nthree\n"  # the whole line
    assert since(1199) == "half\nthree\n"
    assert since(1201) == ""
    for second in range(2000, 2100, 10):
        printed(f"line of {second}\n" * 100, second)
    assert path.read_text().startswith("[openenvd: earlier lines were dropped")
    assert since(2085) == "line of 2090\n" * 100
    assert since(1) == path.read_text()
    marks = tmp_path / f"log{TIMES_SUFFIX}"
    assert marks.stat().st_mode & 0o777 == 0o600
    marks.write_bytes(b"damage\xff\n2050.0 1\n2060.0 99999999\n")
    assert since(2085) == path.read_text()
    assert offset_since(tmp_path / "none", 5) == 0
