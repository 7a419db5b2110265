# SPDX-License-Identifier: Apache-2.0
"""`python -m openenvd.client.health` exits with 0 if the daemon answers, for probes of its pod.

Commands start a daemon where they find none, which in a pod would be one beside its own; this asks
alone. Exit code 0: it answers.
"""

from __future__ import annotations

import sys

from ..schema.settings import Paths
from . import daemon
from .errors import ClientError


def why_not(paths: Paths) -> str | None:
    """Return why the daemon of a home does not answer; None when it does."""
    try:
        client = daemon.find(paths, any_version=True)
        if client is None:
            return "no daemon answers"
        client.health()
    except ClientError as exc:
        return exc.message
    return None


if __name__ == "__main__":
    sys.exit(why_not(Paths.from_environment()))
