# SPDX-License-Identifier: Apache-2.0
"""Whether engines work on this machine: `python -m openenvd.environments.engines.check [NAME…]`.

A process of its own, which answers in JSON, a line for each engine: their libraries are imported
neither into the daemon nor into a worker, which would keep them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict

from ...schema.errors import EngineFailed
from ...system.text.json_lines import Json
from . import registry
from .base import Check, EngineError

CHECK_SECONDS = 30.0  # for all of them; an engine that hangs is one that does not work


def check_engines(names: Iterable[str] | None = None) -> dict[str, Json]:
    """Return the `Check` of these engines, or of all: asked in a process of its own. Blocks."""
    asked = list(registry.names() if names is None else names)
    command = [sys.executable, "-P", "-m", __name__, *asked]
    try:
        done = subprocess.run(command, capture_output=True, timeout=CHECK_SECONDS, check=False)
        answers = done.stdout
        problem = f"asking it ended with code {done.returncode}"
    except subprocess.TimeoutExpired as exc:
        answers = exc.stdout or b""
        problem = f"does not answer within {CHECK_SECONDS:g} s"
    found: dict[str, Json] = {}
    for line in answers.splitlines():
        found |= json.loads(line)
    return {name: found.get(name) or asdict(Check(problem=problem)) for name in asked}


def check_engine(name: str) -> Check:
    """Return whether one engine works; its library is imported here."""
    try:
        os.environ.update(registry.address_here(name).variables)
        return registry.load(name).check()
    except (EngineError, EngineFailed) as exc:
        return Check(problem=exc.message, remedy=exc.hint)
    except Exception as exc:  # of another package's engine
        return Check(problem=f"{type(exc).__name__}: {exc}")


if __name__ == "__main__":
    for name in sys.argv[1:] or registry.names():
        print(json.dumps({name: asdict(check_engine(name))}), flush=True)  # noqa: T201  its answer
