# SPDX-License-Identifier: Apache-2.0
"""Runs a command with a new engine: docker, swarm, slurm, ray or kubernetes.

python -m smoke_tests.engines slurm COMMAND…
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..providers.under_test import PROVIDERS


def main() -> int:
    provider = PROVIDERS[sys.argv[1]]()
    if (reason := provider.why_not()) is not None:
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder, provider.engine(Path(folder)):
        environ = {**os.environ, **provider.variables()}
        return subprocess.run(sys.argv[2:], env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
