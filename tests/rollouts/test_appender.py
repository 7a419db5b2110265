# SPDX-License-Identifier: Apache-2.0
"""What is appended is in the file and in its checksum, whichever of the two is slower or fails."""

from __future__ import annotations

import fcntl
import hashlib
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from openenvd.rollouts.episodes import BytesLike
from openenvd.rollouts.errors import OutputFull
from openenvd.rollouts.folder.appender import DIGESTED_BESIDE_BYTES, Appender
from openenvd.rollouts.folder.direct_io import DIRECT
from openenvd.rollouts.folder.disk import Disk
from openenvd.rollouts.folder.output import Output
from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.folder.spool import LIKELY_BYTES, OWN_PART_BYTES

from .made import finish

MB = 1 << 20


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [one for one in threading.enumerate() if one.name.startswith("rollout-digest")]


@pytest.fixture
def appender() -> Iterator[Appender]:
    made = Appender(Disk())
    yield made
    made.close()


@pytest.mark.parametrize("size", [10, DIGESTED_BESIDE_BYTES, 5 * MB])
@pytest.mark.parametrize("passes", [False, True])
def test_the_digest_has_taken_in_what_was_appended(
    tmp_path: Path, appender: Appender, size: int, passes: bool
) -> None:
    digest = hashlib.sha256()
    for seed in range(3):
        content = memoryview(random.Random(seed).randbytes(size))
        appender.append(tmp_path / "file", [content[:7], content[7:]], digest, passes=passes)
    written = (tmp_path / "file").read_bytes()
    assert (len(written), digest.digest()) == (3 * size, hashlib.sha256(written).digest())


class Slow:
    """A digest that goes on when it may."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may = threading.Event()
        self.error = error
        self.done = False

    def update(self, _: BytesLike, /) -> None:
        assert self.may.wait(30)
        self.done = True
        if self.error is not None:
            raise self.error


def test_appending_is_over_when_the_digest_is(tmp_path: Path, appender: Appender) -> None:
    digest = Slow()
    threading.Timer(0.1, digest.may.set).start()
    appender.append(tmp_path / "file", [bytes(MB)], digest)
    assert digest.done


class Full(Disk):
    """Takes nothing, and lets the digest go on then."""

    def __init__(self, digest: Slow) -> None:
        self._digest = digest

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        self._digest.may.set()
        raise OSError(28, "No space left on device")


def test_what_the_disk_says_is_told_and_nobody_looks_at_the_chunks_any_more(tmp_path: Path) -> None:
    digest = Slow(ValueError("of the digest"))
    appender = Appender(Full(digest))
    with pytest.raises(OutputFull):
        appender.append(tmp_path / "file", [bytes(MB)], digest)
    assert digest.done
    appender.close()


def test_what_the_digest_says_is_told(tmp_path: Path, appender: Appender) -> None:
    digest = Slow(ValueError("of the digest"))
    digest.may.set()
    with pytest.raises(ValueError, match="of the digest"):
        appender.append(tmp_path / "file", [bytes(MB)], digest)


class Watching(Disk):
    """Notes how much it is given, past the cache and through it."""

    def __init__(self) -> None:
        self.past_bytes = self.through_bytes = 0

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        size_bytes = sum(map(len, chunks))
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT:
            self.past_bytes += size_bytes
        else:
            self.through_bytes += size_bytes
        super().write(descriptor, chunks)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize(
    ("steps", "step_bytes", "past"),
    [
        (10, LIKELY_BYTES, 1.0),  # eight of them are a part: from the first on
        (30, LIKELY_BYTES // 2, 0.4),  # when they are as many as that
        (6, LIKELY_BYTES // 2, 0.0),  # never: they are copied into a part
    ],
)
def test_what_becomes_a_part_is_written_past_the_cache(
    tmp_path: Path, steps: int, step_bytes: int, past: float
) -> None:
    disk = Watching()
    with Output(tmp_path, disk=disk) as output:
        finish(output, "a", steps=steps, text="x" * step_bytes)
        output.close()
    whole = steps * step_bytes
    assert (whole >= OWN_PART_BYTES) is bool(past)
    assert past * whole * 0.9 <= disk.past_bytes <= past * whole * 1.5
    open_rollouts(tmp_path).verify()
