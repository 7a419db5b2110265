# SPDX-License-Identifier: Apache-2.0
"""What `--policy` names: `package.module:function`, `openai:URL` or `random`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import PolicyNotFound, StageNotFound
from .chat_policy import ChatPolicy
from .policy import CallablePolicy, Policy
from .random_policy import RandomPolicy, action_schema

CHAT_HINT = (
    "see that the policy's endpoint answers, and what OPENAI_API_KEY and OPENAI_MODEL say; the "
    "request's log says of each episode why it failed"
)
RANDOM = "random"
CHAT_PREFIX = "openai:"
_WHAT = {PolicyNotFound: "policy", StageNotFound: "stage"}


async def policy_named(name: str, address: str) -> Policy:
    """The policy; `address` is asked what an action is."""
    if name != RANDOM and not name.startswith(CHAT_PREFIX):
        return CallablePolicy(await asyncio.to_thread(function_named, name))
    schema = await asyncio.to_thread(action_schema, address)
    return RandomPolicy(schema) if name == RANDOM else ChatPolicy(name[len(CHAT_PREFIX) :], schema)


def hint_of(name: str) -> str | None:
    """What to look at when a policy of this name fails; None: nothing in particular."""
    return CHAT_HINT if name.startswith(CHAT_PREFIX) else None


def function_named(
    name: str, not_found: type[PolicyNotFound | StageNotFound] = PolicyNotFound
) -> Any:
    """What `package.module:function` names."""
    what = _WHAT[not_found]
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise not_found(f"{name!r} does not name a {what}")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise not_found(f"the {what} {name!r} cannot be imported: {exc}") from exc
    except Exception as exc:
        told = f"importing the {what} {name!r} raised {type(exc).__name__}: {exc}"
        raise not_found(told, "run it by itself to see where") from exc
    if not callable(found):
        raise not_found(f"the {what} {name!r} cannot be called")
    return found


@contextmanager
def importable(folder: Path | None) -> Iterator[None]:
    """Makes the modules of the user's folder importable, and forgets them afterwards.

    A process that runs another rollout later then finds them as they are at that time.
    """
    if folder is None:
        yield
        return
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
        imported = set(sys.modules) - before
        for name in [name for name in imported if _lies_in(sys.modules[name], folder)]:
            del sys.modules[name]


def _lies_in(module: Any, folder: Path) -> bool:
    """Whether a module, or a package without an `__init__.py`, lies in the folder."""
    path = getattr(module, "__file__", None)
    paths = getattr(module, "__path__", ()) if path is None else (path,)
    return any(Path(path).is_relative_to(folder) for path in paths)
