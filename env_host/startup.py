# SPDX-License-Identifier: Apache-2.0
"""What a process of the env host does before it serves: descriptors, GPU, byte code, event loop.

Byte code is written for what is imported from some folders, and for nothing else. A project's
dependencies are thousands of files, of which it imports a fifth: each is compiled when it is first
imported. So is our own package, for a Python that is not the one it was installed for: 100 files, a
sixth of what a start costs. The project's own folder is left as it is
(`PYTHONDONTWRITEBYTECODE`, which programs that the environment starts inherit).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from importlib.machinery import SourceFileLoader
from typing import Any

SPARE_FDS = 128  # besides those of sessions: modules, pipes, files of environments
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"

log = logging.getLogger("openenvd.env_host")


def run_loop(main: Awaitable[None], on_end: Callable[[], None]) -> None:
    """Run `main` on the fastest event loop there is; `on_end` before the loop is taken down."""
    import asyncio

    factory = None
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop

    async def run() -> None:
        await main

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())
        on_end()


def sessions_of_process(limit: int) -> int:
    """Return for how many sessions a process has descriptors, with some left for HTTP."""
    return max(1, limit - 2 * SPARE_FDS)


def fitting_sessions(asked: int, limit: int, shards: int) -> int:
    """Return how many of the sessions the descriptors of `shards` processes are enough for."""
    if limit == resource.RLIM_INFINITY:
        return asked
    return max(1, min(asked, sessions_of_process(limit) * shards))


def warn_of_few_fds(asked: int, fitting: int, limit: int, shards: int) -> None:
    """Warn that there will be fewer sessions than were asked for."""
    if fitting < asked:
        log.warning(
            "%d sessions were asked for, and %d are possible: each needs a file descriptor, and "
            "each of %d processes may have %d (ulimit -n). Raise the limit, or use more --shards.",
            asked, fitting, shards, limit,
        )  # fmt: skip


def device_of(index: int, gpus: int, visible: str | None) -> str:
    """Return the device of the shard or session `index`; shards take turns."""
    named = [device.strip() for device in (visible or "").split(",") if device.strip()][:gpus]
    devices = named or [str(number) for number in range(gpus)]
    return devices[index % len(devices)]


def pin_gpu(index: int, gpus: int) -> None:
    """Let this process, and what it starts, see its own device alone; without GPUs, do nothing.

    The caller of the env host makes sure that the devices exist, and may name those of this replica
    in the same variable; without it, they are counted from 0.
    """
    if gpus > 0:
        os.environ[GPUS_VARIABLE] = device_of(index, gpus, os.environ.get(GPUS_VARIABLE))


def write_bytecode_below(*folders: str) -> None:
    """Write the byte code of imported modules whose files lie below one of the folders."""
    write = SourceFileLoader.set_data  # which imports call for byte code alone
    prefixes = tuple(folder + os.sep for folder in folders)

    def set_data(self: SourceFileLoader, path: str, data: Any, **options: Any) -> None:
        if path.startswith(prefixes):
            write(self, path, data, **options)

    SourceFileLoader.set_data = set_data  # type: ignore[method-assign]
    sys.dont_write_bytecode = False
