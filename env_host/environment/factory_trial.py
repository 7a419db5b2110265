# SPDX-License-Identifier: Apache-2.0
"""Creates one environment, in a process of its own, to see its class and whether it can be created.

What the factory leaves behind (threads, connections, a browser) ends with that process, and so does
a factory that takes too long: one of upstream's waits half a minute for a server that is not there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
from dataclasses import dataclass
from typing import Never

from ...system.forking import fork
from ...system.prctl import die_with_parent
from .definition import Definition
from .instances import failure_of

SECONDS = 5.0
_MOST_BYTES = 4096  # more than any answer has

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it: the class and its marking, or a failure, or neither in time."""

    class_name: str | None = None
    is_concurrent: bool = False
    failure: str | None = None


def try_factory(definition: Definition, seconds: float = SECONDS) -> Trial:
    """Create an environment and close it again; waits at most so long."""
    reading, writing = os.pipe()
    parent = os.getpid()
    with open(reading, "rb", buffering=0) as answer:
        try:
            pid = fork()
        except OSError as exc:
            os.close(writing)
            return Trial(failure=f"it could not be tried: {exc}")
        if pid == 0:
            _answer(definition, writing, parent)
        os.close(writing)
        is_answered = bool(select.select([answer], [], [], seconds)[0])
        text = answer.read(_MOST_BYTES) if is_answered else b""
    with contextlib.suppress(ProcessLookupError):  # with what it has started itself
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not is_answered:
        text = b"{}"
        log.warning("%s created no environment in %g s", definition.factory_name, seconds)
    lost = Trial(failure="the process that created an environment has exited")
    return Trial(**json.loads(text)) if text else lost


def marking_of(env_class: type) -> tuple[bool, str]:
    """Whether sessions of a class may run side by side, and its name."""
    return bool(getattr(env_class, "SUPPORTS_CONCURRENT_SESSIONS", False)), env_class.__name__


def _answer(definition: Definition, writing: int, parent: int) -> Never:
    """In the child: create, answer, exit."""
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        answer = json.dumps(_create(definition)).encode()
        os.write(writing, answer)
    finally:
        os._exit(0)


def _create(definition: Definition) -> dict[str, object]:
    try:
        env = definition.factory()
    except BaseException as exc:  # each session will report it
        text = "%s could not create an environment to inspect"
        log.warning(text, definition.factory_name, exc_info=True)
        return {"failure": failure_of(exc)}
    with contextlib.suppress(Exception):
        env.close()
    is_concurrent, name = marking_of(type(env))
    return {"class_name": name, "is_concurrent": is_concurrent}
