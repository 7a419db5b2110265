# SPDX-License-Identifier: Apache-2.0
"""The short form of every load test: that they run, and figures to look at. No thresholds."""

from __future__ import annotations

import subprocess
import sys

PROGRAMS = (
    ("load_tests.cold_cli", 5),
    ("load_tests.idle_memory", 1),
    ("load_tests.launch", 3),
)


def main() -> int:
    """Run them one after the other; the first failure is the answer."""
    for module, repetitions in PROGRAMS:
        command = [sys.executable, "-m", module, "--repetitions", str(repetitions)]
        if (code := subprocess.run(command, check=False).returncode) != 0:
            return code
        print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
