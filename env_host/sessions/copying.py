# SPDX-License-Identifier: Apache-2.0
"""Copies of an environment instance: which way is safe (`choose_tier`), and the copying itself.

    fork    the session has a process of its own, which is forked (`session_process.py`)
    state   the class exports its state, and a new instance imports it
    copy    `copy.deepcopy`: the class declares `BRANCH = "copy"`, or the instance is plain data

An instance is plain if everything that it refers to is: numbers, text, containers, models, arrays
and objects of Python classes, down to the last one, and no object of it belongs to its module too.
`examine` walks through the instance once, for what is not plain, its size, and its generators of
random numbers. It reads attributes without calling code of the project.
"""

from __future__ import annotations

import copy
import random
import sys
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

from ..environment.source_analysis import state_outside_of
from ..errors import BranchRefused, WSErrorCode

# Pairs of methods: that of a class which exports its state for this, gym's, ALE's.
_STATE_METHODS = (
    ("export_state", "import_state"),
    ("get_state", "set_state"),
    ("clone_state", "restore_state"),
)
_ATOMS = (
    *(bool, int, float, complex, str, bytes, bytearray, type(None), type(...), type, range, slice),
    *(UUID, Enum, date, datetime, time, timedelta, Decimal, Fraction, PurePath, types.ModuleType),
    *(types.BuiltinFunctionType, property),
)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MODULE_LEVEL = ("<locals>", "<lambda>")  # in the names of functions that are not at this level
_SEED_LIMIT = 1 << 32  # NumPy takes no larger seeds
MAX_NAMED = 10  # obstacles in a refusal


class Tier(StrEnum):
    """How a branch is made."""

    STATE = "state"
    COPY = "copy"
    FORK = "fork"


class Reason(StrEnum):
    """Why a session cannot branch."""

    THREADS = "threads"
    CHILDREN = "children"
    SOCKETS = "sockets"
    FILES = "files"
    GPU = "gpu"
    SHARED_STATE = "shared_state"
    PLATFORM = "platform"


@dataclass(slots=True)
class Contents:
    """The result of a walk through an instance."""

    size_bytes: int = 0
    obstacles: list[tuple[Reason, str]] = field(default_factory=list)  # to a plain copy
    generators: list[Any] = field(default_factory=list)  # of random numbers


def state_methods(env: Any) -> tuple[str, str] | None:
    """Return the names of the methods that export and import the state of an environment."""
    pairs = (pair for pair in _STATE_METHODS if all(callable(getattr(env, n, None)) for n in pair))
    return next(pairs, None)


def choose_tier(env: Any, contents: Contents) -> Tier:
    """Return the best tier that is safe; raises `BranchRefused` with what stands in the way."""
    if state_methods(env) is not None:
        return Tier.STATE
    if getattr(type(env), "BRANCH", None) == Tier.COPY or not contents.obstacles:
        return Tier.COPY
    reason, _ = contents.obstacles[0]
    raise unsupported(reason, [name for each, name in contents.obstacles if each is reason])


def unsupported(reason: Reason, found: Iterable[str]) -> BranchRefused:
    """Build the refusal of a session that cannot branch."""
    names = list(dict.fromkeys(found))[:MAX_NAMED]
    text = f"This session cannot be copied safely ({reason}): {', '.join(names)}."
    hint = (
        ' Give the class export_state() and import_state(state), or declare BRANCH = "copy" if '
        "copy.deepcopy copies all of its state; or launch it with --isolate, which forks sessions."
    )
    code = WSErrorCode.BRANCH_UNSUPPORTED
    return BranchRefused(text + hint, code, reason=str(reason), found=names)


def examine(env: Any) -> Contents:
    """Walk through everything that an instance refers to."""
    contents, seen = Contents(), set[int]()
    env_class: Any = type(env)
    of_module = _shared_objects(env_class)
    waiting: list[tuple[str, Any]] = [("self", env)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        contents.size_bytes += sys.getsizeof(value, 0)
        if id(value) in of_module and not isinstance(value, _ATOMS):
            contents.obstacles.append((Reason.SHARED_STATE, f"{name} belongs to its module"))
        elif (reason := _obstacle(value)) is not None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            contents.obstacles.append((reason, f"{name}: {kind}"))
        else:
            if _is_generator(value):
                contents.generators.append(value)
            waiting += _parts(name, value)
    outside = state_outside_of(env_class)
    contents.obstacles += [(Reason.SHARED_STATE, each) for each in outside]
    return contents


def copies_of(env: Any, count: int) -> list[Any]:
    """Return deep copies; raises `BranchRefused`: a part of it cannot be copied."""
    try:
        return [copy.deepcopy(env) for _ in range(count)]
    except (TypeError, NotImplementedError) as exc:  # what a lock, a file or a socket raises
        raise unsupported(Reason.SHARED_STATE, [str(exc)]) from exc


def export_state(env: Any) -> Any:
    """Return a copy of the state that an environment with `state_methods` exports."""
    name, _ = state_methods(env) or ("", "")
    return copy.deepcopy(getattr(env, name)())


def import_state(env: Any, state: Any) -> None:
    """Give an environment a copy of the state that another instance of it has exported."""
    _, name = state_methods(env) or ("", "")
    getattr(env, name)(copy.deepcopy(state))


def reseed(generators: Iterable[Any], seed: int) -> None:
    """Seed generators: each differently, and all equally for the same seed."""
    for number, generator in enumerate(generators):
        own = (seed + number * 0x9E3779B9) % _SEED_LIMIT
        if hasattr(generator, "manual_seed"):  # torch
            generator.manual_seed(own)
        elif hasattr(generator, "bit_generator"):  # NumPy's newer kind
            kind = type(generator.bit_generator)
            generator.bit_generator.state = kind(own).state
        else:
            generator.seed(own)


def _is_generator(value: Any) -> bool:
    kinds: list[Any] = [random.Random]
    for module, name in (("numpy.random", "Generator"), ("numpy.random", "RandomState")):
        kinds.append(getattr(sys.modules.get(module), name, random.Random))
    kinds.append(getattr(sys.modules.get("torch"), "Generator", random.Random))
    return isinstance(value, tuple(kinds))


# By package: why an object of a class of it has no plain copy.
_REASONS = {
    **dict.fromkeys(("_thread", "threading", "concurrent"), Reason.THREADS),
    **dict.fromkeys(("subprocess", "multiprocessing"), Reason.CHILDREN),
    **dict.fromkeys(
        ("socket", "_socket", "ssl", "asyncio", "_asyncio", "selectors"), Reason.SOCKETS
    ),
    **dict.fromkeys(("io", "_io", "sqlite3", "mmap", "tempfile"), Reason.FILES),
}
_COPIED = (*_ATOMS, *_CONTAINERS, dict, types.MappingProxyType, types.MethodType)


def _obstacle(value: Any) -> Reason | None:
    """Return why an object has no plain copy; None: it has one, if its parts have."""
    if isinstance(value, _COPIED):
        return None
    kind = type(value)
    if (reason := _REASONS.get(kind.__module__.partition(".")[0])) is not None:
        return reason
    if getattr(value, "is_cuda", False) is True:
        return Reason.GPU
    return None if _is_plain(value, kind) else Reason.SHARED_STATE


def _is_plain(value: Any, kind: type) -> bool:
    if isinstance(value, types.FunctionType):
        is_local = any(each in value.__qualname__ for each in _MODULE_LEVEL)
        return not (value.__closure__ or is_local)
    if _is_generator(value):
        return kind is not random.SystemRandom
    root = kind.__module__.partition(".")[0]
    if root in ("numpy", "torch"):
        return getattr(getattr(value, "dtype", None), "hasobject", False) is False
    is_of_python = hasattr(value, "__dict__") or bool(_slots(kind))
    return bool(kind.__flags__ & _HEAP_TYPE) and is_of_python and not hasattr(kind, "__del__")


_HEAP_TYPE = 1 << 9  # `Py_TPFLAGS_HEAPTYPE`: made by a class statement, or as one is


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, (dict, types.MappingProxyType)):
        keys = [(name, key) for key in value]
        return [*keys, *((f"{name}[{key!r}]", each) for key, each in value.items())]
    if isinstance(value, _CONTAINERS):
        return [(name, each) for each in value]
    if isinstance(value, types.MethodType):
        return [(name, value.__self__)]
    if isinstance(value, (*_ATOMS, types.FunctionType)) or _is_generator(value):
        return []
    found = dict(getattr(value, "__dict__", {}))
    for slot in _slots(type(value)):
        try:
            found[slot] = object.__getattribute__(value, slot)
        except AttributeError:  # not set
            continue
    return [(f"{name}.{key}", each) for key, each in found.items()]


def _slots(kind: type) -> list[str]:
    return [
        name
        for owner in kind.__mro__
        for name, each in vars(owner).items()
        if isinstance(each, types.MemberDescriptorType)
    ]


def _shared_objects(kind: type) -> set[int]:
    """Return the ids of what a class's modules and the class itself hold: no session's own."""
    owners = [owner for owner in kind.__mro__ if owner is not object]
    modules = [sys.modules.get(owner.__module__) for owner in owners]
    held: list[Any] = [value for each in modules if each for value in vars(each).values()]
    held += [value for owner in owners for value in vars(owner).values()]
    return {id(value) for value in held}
