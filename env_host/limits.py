# SPDX-License-Identifier: Apache-2.0
"""How many sessions one host serves at once: by what was asked and what the class allows."""

from __future__ import annotations

import logging
from typing import Any

from .definition import Definition
from .errors import NotConcurrent
from .protocol import DEFAULT_SESSIONS

log = logging.getLogger("openenvd.env_host")


def session_limit(asked: int | None, *, is_concurrent: bool, class_name: str) -> int:
    """The most sessions at once.

    Raises:
        NotConcurrent: several were asked of a class that allows one.
    """
    if is_concurrent:
        return asked or DEFAULT_SESSIONS
    if asked is not None and asked > 1:
        raise NotConcurrent(class_name, asked)
    return 1


def supports_concurrency(definition: Definition) -> tuple[bool, str]:
    """Whether sessions may run side by side, and the name of the class that says so.

    A factory that is no class is asked for one environment, to see what it makes.
    """
    env_class: Any = definition.env_class
    if env_class is None:
        env_class = _class_made_by(definition)
    if env_class is None:
        return False, definition.factory_name
    return bool(getattr(env_class, "SUPPORTS_CONCURRENT_SESSIONS", False)), env_class.__name__


def _class_made_by(definition: Definition) -> type | None:
    try:
        env = definition.factory()
        env_class = type(env)
        env.close()
    except Exception:  # each session will say so; until then nothing is known of it
        log.warning("%s made no environment when asked", definition.factory_name, exc_info=True)
        return None
    return env_class
