# SPDX-License-Identifier: Apache-2.0
"""The console scripts' entry point: imports nothing itself, so that Ctrl-C works at once.

Importing the command group takes about 50 ms. An interrupt in that time ends the command like a
later one, with exit code 130, and not with a traceback from an import.
"""

import sys


def main() -> None:
    """Run the command line of this process."""
    try:
        from ..system.process.standard_streams import open_closed_streams

        open_closed_streams()
        from .main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        sys.exit(130)  # `exit_codes.INTERRUPTED`, whose module may not be imported yet
