# SPDX-License-Identifier: Apache-2.0
"""The console scripts' entry point: imports nothing itself, so that Ctrl-C is heard at once.

Importing the command group takes about 50 ms. An interrupt in that time ends the command as one
does later, with exit code 130, and not with a traceback of whatever was being imported.

A service manager may start a program with its standard streams closed. Python has `None` for such
a stream, and the next file or socket that is opened gets its descriptor, and with it what others
print. So the null device is opened in their place before anything else.
"""

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by their descriptors


def main() -> None:
    """Run the command line of this process."""
    try:
        _open_closed_streams()
        from .main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        sys.exit(130)  # `exit_codes.INTERRUPTED`, whose module may not be imported yet


def _open_closed_streams() -> None:
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor is this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115
