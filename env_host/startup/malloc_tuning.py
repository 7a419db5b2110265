# SPDX-License-Identifier: Apache-2.0
"""Lets the C library keep the memory of a message for the next one.

glibc returns a freed block of megabytes to the kernel at once, and gets zeroed pages for the next
message, one page fault each: at 2 MB a message, that was two thirds of the time of a step.
So blocks up to `LARGE_BYTES` come from the heap, whose top keeps `KEEP_BYTES`, until there are no
sessions: then `give_back` returns it all. Elsewhere than on glibc, nothing happens.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...system.units import MB

LARGE_BYTES = 8 * MB
KEEP_BYTES = 16 * MB
TRIM_VARIABLE = "MALLOC_TRIM_THRESHOLD_"  # `mallopt(3)`: what a process begins with
_GLIBCS_BYTES = 128 * 2**10
_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_THRESHOLD = -3


def _function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)


_mallopt = _function("mallopt")
_malloc_trim = _function("malloc_trim")


def keep_pages() -> None:
    """Keep freed pages from now on, in this process and those forked from it."""
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        _mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)


@contextmanager
def kept_pages() -> Iterator[None]:
    """Keep freed pages in this context; then follow glibc, or its environment variable."""
    keep_pages()
    try:
        yield
    finally:
        if _mallopt is not None:
            _mallopt(_M_MMAP_THRESHOLD, _GLIBCS_BYTES)
            setting = os.environ.get(TRIM_VARIABLE, "")
            _mallopt(_M_TRIM_THRESHOLD, int(setting) if setting.isdecimal() else _GLIBCS_BYTES)
        give_back()


def give_back() -> None:
    """Return free pages to the kernel; takes milliseconds."""
    if _malloc_trim is not None:
        _malloc_trim(0)
