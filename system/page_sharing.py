# SPDX-License-Identifier: Apache-2.0
"""Prepares a process's memory for forking, so that its children write to fewer shared pages.

A child gets a copy of each page that it writes to. Much of what it writes is new objects, and
Python and glibc put these into the free blocks between the objects that it shares; and the type
cache holds a reference to a name for each lookup that it remembers, so that every lookup which
takes another's place writes to the page of a name. So before the first fork these free blocks are
taken, for good, and the type cache is cleared.

Measured with CPython 3.11 on 40 idle environments: 13.1 MB of PSS each instead of 16.0.

None of it changes what a program does: where an allocator is another, little or nothing is taken.
"""

from __future__ import annotations

import ctypes
import sys

# Of CPython's allocator for small objects (Objects/obmalloc.c), since 3.10.
_POOL_BYTES = 16 * 1024
_POOL_HEADER_BYTES = 48
_ALIGNMENT = 16
_LARGEST = 512
_BYTES_HEADER = 33  # of a `bytes` object
_MOST_BLOCKS = 2000  # of one size: where blocks are never in a row, another allocator is in use
_LARGEST_CHUNK_SHIFT = 16  # of what is free in the heap: 64 kB, below glibc's limit for `mmap`

_taken: list[bytes] = []


def prepare_to_fork() -> None:
    """Take the free blocks between objects, and clear the type cache; takes milliseconds."""
    for name in ("_clear_internal_caches", "_clear_type_cache"):  # since 3.13, until then
        if (clear := getattr(sys, name, None)) is not None:
            clear()
            break
    _take_small_blocks()
    _take_heap_chunks()


def _take_small_blocks() -> None:
    """Allocate blocks of each size until they come from a pool that was not in use."""
    for size in range(_ALIGNMENT * 3, _LARGEST + 1, _ALIGNMENT):
        before = 0
        for _ in range(_MOST_BLOCKS):
            block = bytes(size - _BYTES_HEADER)
            _taken.append(block)
            address = id(block)
            is_second = address % _POOL_BYTES == _POOL_HEADER_BYTES + size
            if is_second and before == address - size:
                break
            before = address
        else:
            return


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` (mallinfo(3), glibc 2.33)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _take_heap_chunks() -> None:
    """Allocate from glibc's heap until only its end is free."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return
    library.mallinfo2.restype = _MallocInfo
    library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.sbrk.argtypes = [ctypes.c_ssize_t]
    info = library.mallinfo2()
    end = library.sbrk(0) - info.keepcost
    sizes = [1 << shift for shift in range(_LARGEST_CHUNK_SHIFT, 9, -1)]
    left = info.fordblks
    for size in (*sizes, *range(_LARGEST - _ALIGNMENT, 0, -_ALIGNMENT)):
        while left > 0 and (address := library.malloc(size)) is not None:
            if address >= end:
                library.free(address)
                break
            left -= size
