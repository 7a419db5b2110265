# SPDX-License-Identifier: Apache-2.0
"""Bodies above 64 kB go through shared memory, with the socket as doorbell.

One memfd per connection, made by the shard and sent with its HELLO; half of it for each direction.

    sender                                      receiver
      copies the body into its half
      frame with offset and length ───────────▶ copies the body out, at once
      frees the place              ◀─────────── RELEASE, in the order of the frames

The receiver copies: whoever gets the bytes may keep them. The system calls around the frame and
the RELEASE order the memory. A body that finds no place is sent by the socket, so nobody ever
waits for one, and without memfd (macOS) all bodies are. Pages are given back to the system when a
half has been empty for a while (at once would be dear: new ones have to be cleared). The sender
cannot shrink the memory under the receiver: it is sealed.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections import deque

from .errors import WireError

DOORBELL_BYTES = 64 * 1024  # larger bodies go through shared memory
HALF_BYTES = 64 * 2**20  # for one direction; pages never written cost nothing
KEEP_BYTES = 2**20  # of a half, kept when it is empty
KEEP_SECONDS = 5.0  # all the rest is kept for so long


class RingPlan:
    """Which parts of a half are taken. Bodies are freed in the order they came. Pure."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: deque[tuple[int, int]] = deque()  # (offset, bytes), the oldest first
        self._high = 0  # no byte at or above it was written since `trim`

    def take(self, count: int) -> int | None:
        """The offset of `count` bytes; None when there is no such place just now."""
        offset = self._place(count)
        if offset is not None:
            self._taken.append((offset, count))
            self._high = max(self._high, offset + count)
        return offset

    def free_oldest(self) -> None:
        """The oldest body was read.

        Raises:
            WireError: there is none.
        """
        if not self._taken:
            raise WireError("the peer released a body that it never got")
        self._taken.popleft()

    @property
    def is_worth_trimming(self) -> bool:
        """Whether it is empty, and larger than is kept."""
        return not self._taken and self._high > KEEP_BYTES

    def trimmed(self) -> None:
        """Its pages have been given back."""
        self._high = 0

    def _place(self, count: int) -> int | None:
        if not self._taken:
            return 0 if count <= self._size else None
        tail = self._taken[0][0]
        head = sum(self._taken[-1])
        if head > tail:
            if self._size - head >= count:
                return head
            return 0 if tail >= count else None
        return head if tail - head >= count else None


class Rings:
    """Both halves of one connection, from the side that writes half `own` (0 or 1)."""

    def __init__(self, fd: int, half_bytes: int, own: int) -> None:
        self._map = mmap.mmap(fd, 2 * half_bytes)
        self._half_bytes = half_bytes
        self._own = own * half_bytes
        self._other = (1 - own) * half_bytes
        self._plan = RingPlan(half_bytes)
        self._puts = 0
        self._trimming: asyncio.TimerHandle | None = None

    def put(self, body: bytes | bytearray | memoryview) -> int | None:
        """Copy a body into our half; its offset, or None: send it by the socket."""
        offset = self._plan.take(len(body))
        if offset is not None:
            self._puts += 1
            start = self._own + offset
            self._map[start : start + len(body)] = body
        return offset

    def get(self, offset: int, count: int) -> bytes:
        """A body out of the other's half; the other must then be told to release it.

        Raises:
            WireError: there is no such place.
        """
        if offset + count > self._half_bytes:
            raise WireError("a body that lies outside of the shared memory")
        return self._map[self._other + offset : self._other + offset + count]

    def released(self) -> None:
        """The other has read our oldest body."""
        self._plan.free_oldest()
        if self._plan.is_worth_trimming and self._trimming is None:
            self._trim_later()

    def close(self) -> None:
        """Give the memory up."""
        if self._trimming is not None:
            self._trimming.cancel()
        self._map.close()

    def _trim_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._trimming = loop.call_later(KEEP_SECONDS, self._trim, self._puts)

    def _trim(self, puts: int) -> None:
        self._trimming = None
        if not self._plan.is_worth_trimming:
            return  # the release that empties it next comes here again
        if self._puts != puts:
            self._trim_later()
            return
        self._map.madvise(mmap.MADV_REMOVE, self._own, self._half_bytes)
        self._plan.trimmed()


def create(half_bytes: int = HALF_BYTES) -> tuple[Rings, int] | None:
    """A client's rings and the descriptor to send; None where the system has no memfd."""
    if not hasattr(os, "memfd_create") or not hasattr(mmap, "MADV_REMOVE"):
        return None
    fd = os.memfd_create("openenvd-world", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, 2 * half_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return Rings(fd, half_bytes, own=0), fd
    except BaseException:
        os.close(fd)
        raise


def adopt(fd: int) -> Rings:
    """The state process's side of the memory that a client has sent; `fd` stays the caller's.

    Raises:
        WireError: it is not such memory.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
        if not seals & fcntl.F_SEAL_SHRINK or size < 2 or size % (2 * mmap.PAGESIZE):
            raise WireError("memory that could shrink while we read it")
        return Rings(fd, size // 2, own=1)
    except (OSError, ValueError) as exc:
        raise WireError(f"a descriptor that is no shared memory: {exc}") from exc
