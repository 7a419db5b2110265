# SPDX-License-Identifier: Apache-2.0
"""Opens the null device on standard streams that are closed.

A service manager may start a program with closed streams. Python has `None` for one, the next
opened file or socket gets its descriptor and so the output of other code, and libuv aborts the
process. Light: the command line imports it first.
"""

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by their descriptors


def open_closed_streams() -> None:
    """Open the closed standard streams of this process."""
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor is this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115
