# SPDX-License-Identifier: Apache-2.0
"""The mixing buffer and the song: what all singers share, in the state process.

Time is counted in samples of the brigade's own clock, which begins with the state. Singer A plays
the buffer's content at a position, sings along, and sends the recorded voice *for that position*.
It is added there, so a later reader of the position hears A. So everybody hears those ahead of
them, and no singer waits for the network of another.

       position  ──────────────────────────────────────────────────────▶ time
       written by   … 3rd singers      2nd singers      the leader │ now
       read by      4th singers   ◀──  3rd      ◀──     2nd
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from .opus import SAMPLE_RATE

BUFFER_SAMPLES = 120 * SAMPLE_RATE
FUTURE_SAMPLES = SAMPLE_RATE  # the most that a client's clock may be ahead of the brigade's clock
DELAY_SAMPLES = 3 * SAMPLE_RATE  # between two places in the chain
PLACES = 6  # places in the chain; further singers share them
LOUDNESS = 1.2
PHANTOMS = 2  # imaginary extra singers, which make the gain fall more slowly than 1 / singers
MAX_SAMPLES = 20 * SAMPLE_RATE  # in one packet

Pcm = npt.NDArray[np.int16]


class WrongTime(ValueError):
    """A position that is not in the buffer: it is too old, or too far in the future."""


class MixingBuffer:
    """The last two minutes of what everybody has sung, by position."""

    def __init__(self, length: int = BUFFER_SAMPLES) -> None:
        # `np.full` writes to every page, `np.zeros` to none: its growth would look like a leak.
        self._sum = np.full(length, 0, np.float32)
        self._singers = np.full(length, 0, np.int16)
        self._cleared = 0  # from this position on, the buffer has samples of two minutes ago
        counts = np.arange(2**15, dtype=np.float32)
        self._gains = (LOUDNESS * ((1 + PHANTOMS) / (counts + PHANTOMS)) ** 0.5).astype(np.float32)

    def write(self, position: int, pcm: Pcm, now: int) -> None:
        """Add a voice. Raises `WrongTime`: the position is not in the buffer."""
        self._reach(position, len(pcm), now)
        for part, taken in self._parts(position, len(pcm)):
            self._sum[part] += pcm[taken]
            self._singers[part] += 1

    def read(self, position: int, count: int, now: int) -> tuple[Pcm, int]:
        """Return the mix and the most singers heard in it; `WrongTime`: it is not in the buffer."""
        self._reach(position, count, now)
        mixed, most = np.empty(count, np.int16), 0
        for part, taken in self._parts(position, count):
            singers = self._singers[part]
            heard = self._sum[part] * self._gains[singers]
            mixed[taken] = np.clip(heard, -32768, 32767, out=heard)
            most = max(most, int(singers.max(initial=0)))
        return mixed, most

    def clear(self) -> None:
        """Drop everything."""
        self._sum.fill(0)
        self._singers.fill(0)

    def _reach(self, position: int, count: int, now: int) -> None:
        """Check that a span is in the buffer, and clear stale samples of the last round."""
        end = position + count
        if end > now + FUTURE_SAMPLES:
            raise WrongTime(f"{(end - now) / SAMPLE_RATE:.1f} s into the future")
        if position < max(now, self._cleared) + FUTURE_SAMPLES - len(self._sum):
            raise WrongTime(f"{(now - position) / SAMPLE_RATE:.1f} s ago is no longer there")
        if end <= self._cleared:
            return
        stale = min(end - self._cleared, len(self._sum))
        for part, _ in self._parts(end - stale, stale):
            self._sum[part] = 0
            self._singers[part] = 0
        self._cleared = end

    def _parts(self, position: int, count: int) -> list[tuple[slice, slice]]:
        """The one or two places in the ring where a span lies, and what of the span lies there."""
        length = len(self._sum)
        start = position % length
        first = min(count, length - start)
        parts = [(slice(start, start + first), slice(0, first))]
        if first < count:
            parts.append((slice(0, count - first), slice(first, count)))
        return parts


class Brigade:
    """The shared state: the buffer, who leads, and the song. Its public methods are the world's."""

    def __init__(self) -> None:
        self._buffer = MixingBuffer()
        self._began = time.monotonic()
        self._leader: int | None = None
        self._song_start: int | None = None
        self._song_end: int | None = None
        self._singers: dict[int, int] = {}  # by session: the place in the chain
        self._joined = 0

    def join(self, session: int, place: int | None = None) -> dict[str, Any]:
        """Come in, or come in again; `place` 0 is next to the leader."""
        if place is None:
            place = self._singers.get(session, self._joined % PLACES)
        self._joined += session not in self._singers
        self._singers[session] = place
        return self._facts(session)

    def mix(
        self,
        session: int,
        read_at: int,
        samples: int,
        write_at: int | None = None,
        body: bytes | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Add `body`, if any, at `write_at`; return the mix at `read_at`. Raises `WrongTime`."""
        if not 0 < samples <= MAX_SAMPLES:
            raise ValueError(f"{samples} samples; a packet has 1 to {MAX_SAMPLES}")
        now = self._now()
        written = False
        if body and write_at is not None and self._is_song(write_at):
            self._buffer.write(write_at, np.frombuffer(body, np.int16), now)
            written = True
        if self._is_song(read_at):
            mixed, heard = self._buffer.read(read_at, samples, now)
        else:
            mixed, heard = np.zeros(samples, np.int16), 0
        facts = {**self._facts(session), "heard": heard, "written": written}
        return facts, mixed.tobytes()

    def lead(self, session: int) -> dict[str, Any]:
        """Be the one whom all follow; a song that was being sung is over."""
        self._end_song()
        self._leader = session
        self._singers[session] = 0
        return self._facts(session)

    def start_song(self, session: int, at: int | None = None) -> dict[str, Any]:
        """Begin, at a position or now; only the leader may."""
        self._check_leads(session)
        self._buffer.clear()
        self._song_start = self._now() if at is None else at
        self._song_end = None
        return self._facts(session)

    def stop_song(self, session: int, at: int | None = None) -> dict[str, Any]:
        """End the song at a position or now; only the leader may."""
        self._check_leads(session)
        self._end_song(at)
        return self._facts(session)

    def session_ended(self, session: int) -> None:
        """Remove a singer who has left. If it was the leader, the song ends."""
        self._singers.pop(session, None)
        if session == self._leader:
            self._end_song()
            self._leader = None

    def _facts(self, session: int) -> dict[str, Any]:
        place = self._singers.get(session, 0)
        return {
            "clock": self._now(),
            "delay": place * DELAY_SAMPLES,
            "singers": len(self._singers),
            "leads": session == self._leader,
            "has_leader": self._leader is not None,
            "song_start": self._song_start,
            "song_end": self._song_end,
        }

    def _now(self) -> int:
        return int((time.monotonic() - self._began) * SAMPLE_RATE)

    def _is_song(self, position: int) -> bool:
        if self._song_start is None or position < self._song_start:
            return False
        return self._song_end is None or position < self._song_end

    def _end_song(self, at: int | None = None) -> None:
        if self._song_start is not None and self._song_end is None:
            self._song_end = self._now() if at is None else at

    def _check_leads(self, session: int) -> None:
        if session != self._leader:
            raise PermissionError("only the leading singer may begin or end the song")
