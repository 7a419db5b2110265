# SPDX-License-Identifier: Apache-2.0
"""Imports the modules that serve sessions: for a zygote, and before the environment.

Importing them starts no thread and makes no loop. A module that is missing here costs each host a
copy of its own. It may also be taken from the project's folder, which comes first on the path later
and may have a `queue.py`. Upstream's server has imported most of these by then, too. If a file of
the project has the name of one of the others, the project imports its file: `yield_names`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from .event_loop import host_libraries

# Standard-library modules that we import, but that upstream's server does not before the app does.
OURS_ALONE = ("mmap", "resource", "stringprep", "sysconfig")
# Further ones that a zygote has imported, for operations, when it forks a host.
ZYGOTES = ("argparse", "difflib", "glob", "pkgutil", "pwd", "shlex", "statistics")
_PATCHED = (
    *("_thread", "os", "queue", "select", "selectors"),
    *("signal", "socket", "subprocess", "threading", "time"),
)
_OURS = "openenvd.env_host"
MODULES = (
    *("asyncio.runners", "concurrent.futures.thread", "encodings.ascii", "encodings.idna"),
    *("faulthandler", "httptools", "multiprocessing.resource_tracker", "orjson", "pydantic"),
    *("uuid", "uvicorn.lifespan.on", "uvicorn.loops.auto", "uvicorn.protocols.http.auto"),
    "uvicorn.protocols.http.httptools_impl",
    *("uvicorn.protocols.websockets.websockets_sansio_impl", "uvicorn.server"),
    *(f"{_OURS}.environment.{name}" for name in ("definition", "source_analysis", "interfaces")),
    *(f"{_OURS}.environment.upstream_project", f"{_OURS}.main", f"{_OURS}.serving.app"),
    *(f"{_OURS}.serving.uvicorn_server", f"{_OURS}.shard.shard", f"{_OURS}.startup"),
    f"{_OURS}.shard.session_process",
    *(f"{_OURS}.shared_state.connection", f"{_OURS}.supervisor.supervisor"),
)


def preload() -> None:
    """Import each module on its own: one that is not installed must not keep out the others."""
    with host_libraries():
        for module in MODULES:
            with suppress(ImportError):
                importlib.import_module(module)


def take_own_view() -> None:
    """Give our modules copies of the modules that libraries patch process-wide, once for all.

    After `gevent.monkey.patch_all()` or `eventlet.monkey_patch()` a new thread is not a real one,
    and code that waits for a child or a socket waits for a loop that does not run here.
    """
    copies: dict[int, ModuleType] = {}
    for name in _PATCHED:
        module = importlib.import_module(name)
        copies[id(module)] = copy = ModuleType(name, module.__doc__)
        vars(copy).update(vars(module))
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{__package__.partition('.')[0]}."):
            for attribute, value in list(vars(module).items()):
                if (own := copies.get(id(value))) is not None:
                    setattr(module, attribute, own)


def unpatch_children() -> None:
    """Undo gevent's patches of the functions that start children and wait for them.

    gevent's child watchers only work in the main thread, and steps run on other threads.
    """
    saved = getattr(sys.modules.get("gevent.monkey"), "saved", {})
    for name in ("os", "subprocess"):
        vars(sys.modules[name]).update(saved.get(name, {}))


def yield_names(folders: Iterable[str]) -> None:
    """Yield the names of our modules to the project's files that are called the same."""
    for folder in folders:
        for name in (*OURS_ALONE, *ZYGOTES):
            if Path(folder, f"{name}.py").exists() or Path(folder, name).is_dir():
                sys.modules.pop(name, None)


preload()
take_own_view()  # on import: a zygote does it once for all hosts, as it touches many pages
