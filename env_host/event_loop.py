# SPDX-License-Identifier: Apache-2.0
"""The event loop that a process runs, and libraries that the host has installed for itself.

    code of the project runs on the loop   the loop that upstream's server would have there:
                                           uvloop where the project has it, otherwise asyncio's
    only ours                              uvloop where there is one: a step takes less

Libraries that change the running loop (`nest_asyncio`) know asyncio's alone. uvloop and httptools
are not among what a project needs: they are installed in a folder of their own, which is on the
path only while this module and `preload.py` import them, and are no modules to the project.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import selectors
import signal
import sys
import threading
import warnings
from _thread import get_ident
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..schema.protocol import HOST_LIBRARIES
from ..system.process.signal_pipe import take_over

_FOLDER = Path(sys.prefix, HOST_LIBRARIES)


@contextmanager
def host_libraries() -> Iterator[None]:
    """Find the host's own libraries meanwhile, after those of the project."""
    sys.path.append(str(_FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(_FOLDER))
        for name, module in list(sys.modules.items()):
            if _is_hosts(module):
                del sys.modules[name]


def _is_hosts(module: Any) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(f"{_FOLDER}/")


uvloop: Any = None
with suppress(ImportError), host_libraries():
    uvloop = importlib.import_module("uvloop")


def drop_imported_loop() -> None:
    """Drop the event loop that an import has left, as gradio's does: all forks would share it.

    One that the project holds itself stays open.
    """
    with warnings.catch_warnings(action="ignore"):  # policies are deprecated; it was not closed
        if type(asyncio.get_event_loop_policy()) is asyncio.DefaultEventLoopPolicy:
            asyncio.set_event_loop_policy(None)
        gc.collect()


def run_loop(
    main: Coroutine[Any, Any, None], on_end: Callable[[], None], *, has_project_code: bool
) -> None:
    """Run `main` on an event loop; `on_end` before the loop is taken down."""
    is_projects = _FOLDER.is_dir() and not _is_hosts(uvloop)
    # uvloop handles signals only in the thread that it considers the main thread.
    is_main = threading.main_thread().ident == get_ident()  # not after gevent's patches
    is_wanted = uvloop is not None and is_main and (is_projects or not has_project_code)

    def new_event_loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(selectors.DefaultSelector())

    factory = uvloop.new_event_loop if is_wanted else new_event_loop
    # Else the runner handles it, in forked children, too.
    take_over((signal.SIGINT,), lambda number: signal.signal(number, signal.SIG_IGN))
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)
        on_end()
