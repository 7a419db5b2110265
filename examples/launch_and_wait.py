# SPDX-License-Identifier: Apache-2.0
"""Launch an environment from Python, and print its address.

python launch_and_wait.py echo
"""

from __future__ import annotations

import os
import sys

from openenvd.client import connect, run
from openenvd.client.errors import ClientError


def launch(source: str) -> str:
    """Launch `source`, wait until it is ready, and return its address."""
    client = connect()  # starts the daemon when none is running
    request = run(client, "launch", {"source": source, "cwd": os.getcwd()})
    return str(request["result"]["environment"]["address"])


if __name__ == "__main__":
    try:
        print(launch(sys.argv[1]))
    except ClientError as exc:
        sys.exit(str(exc))
