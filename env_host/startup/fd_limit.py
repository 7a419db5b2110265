# SPDX-License-Identifier: Apache-2.0
"""How many descriptors a process may have, and for how many sessions they are enough."""

from __future__ import annotations

import logging
import resource

SPARE_FDS = 128  # besides those of sessions: modules, pipes, files of environments

log = logging.getLogger("openenvd.env_host")


def sessions_of_process(limit: int) -> int:
    """Return for how many sessions a process has descriptors, with some left for HTTP."""
    return max(1, limit - 2 * SPARE_FDS)


def fitting_sessions(asked: int, limit: int, shards: int) -> int:
    """Return how many of the sessions the descriptors of `shards` processes are enough for."""
    if limit == resource.RLIM_INFINITY:
        return asked
    return max(1, min(asked, sessions_of_process(limit) * shards))


def warn_of_few(asked: int, fitting: int, limit: int, shards: int) -> None:
    """Warn that there will be fewer sessions than were asked for."""
    if fitting < asked:
        log.warning(
            "%d sessions were asked for, and %d are possible: each needs a file descriptor, and "
            "each of %d processes may have %d (ulimit -n). Raise the limit, or use more --shards.",
            asked, fitting, shards, limit,
        )  # fmt: skip
