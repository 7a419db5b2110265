# SPDX-License-Identifier: Apache-2.0
"""What engines look at, change and refuse in what a replica is given.

`HOST_OPTIONS_VARIABLE` has the options of its server, as JSON. `--engine-option NAME=VALUE` are the
engine's own, which `read_options` reads by the engine's table.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any

from ...schema.protocol import HOST_OPTIONS_VARIABLE
from ...system.text.json_lines import Json
from .base import EngineRefused, ReplicaPlan


def host_options(env: Mapping[str, str]) -> Json:
    """Return the options that a replica's variables have for its server."""
    return dict(json.loads(env.get(HOST_OPTIONS_VARIABLE) or "{}"))


def with_host_options(env: Mapping[str, str], **changed: Any) -> dict[str, str]:
    """Return a replica's variables with other options for its server."""
    return {**env, HOST_OPTIONS_VARIABLE: json.dumps(host_options(env) | changed)}


def served_anywhere(env: Mapping[str, str]) -> dict[str, str]:
    """Let the server be called by the addresses of its node or pod, too."""
    return with_host_options(env, host="0.0.0.0")  # noqa: S104


def read_options(
    engine: str, given: Mapping[str, str], known: Mapping[str, Callable[[str], Any]]
) -> Json:
    """Return the values of an engine's own options, by name.

    Args:
        engine: Its name.
        given: The options as texts.
        known: What reads each that it has; raises `ValueError` with how to write it.

    Raises:
        EngineRefused: An option is not known, or its value is not one.
    """
    found = {}
    for name, text in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            all_of_them = f"{meant}It has: {', '.join(sorted(known))}"
            raise EngineRefused(f"{engine} has no option {name!r}", all_of_them)
        try:
            found[name] = known[name](text)
        except ValueError as exc:
            raise EngineRefused(f"--engine-option {name}={text}: {exc}") from exc
    return found


def check_no_sandbox(what: str, *, sandbox: bool) -> None:
    """Refuse a sandbox for what is a process of a user; raises `EngineRefused`."""
    if sandbox:
        hint = "leave out --sandbox; or run containers: --provider docker"
        raise EngineRefused(f"{what}: it has no sandbox", hint)


def check_token(plan: ReplicaPlan, address: str | None) -> None:
    """Refuse to serve without a token at an address that others can reach; None: there is none."""
    if address is not None and host_options(plan.env).get("token") is None:
        raise EngineRefused(
            f"nodes of this cluster serve at their own addresses ({address}, …), where everybody "
            "on its network could use the environment",
            "launch with --token auto",
        )


def check_gpus(wanted: float, most: float, remedy: str) -> None:
    """Refuse more GPUs than the node has that has most; `remedy` says how to see what they have."""
    if wanted > most:
        have = "1 GPU" if most == 1 else f"{most:g} GPUs"
        text = f"--gpus {wanted:g}: no node of this cluster has more than {have}"
        raise EngineRefused(text, remedy)
