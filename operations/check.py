# SPDX-License-Identifier: Apache-2.0
"""`check`: what this machine offers, and what is missing."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..environments import run_files
from ..environments.errors import PreparationFailed
from ..environments.layout import Layout
from ..environments.sources.resolve import bundled
from ..environments.venv.uv import find_uv, package_source
from ..shim.client import read_status_file
from ..system.request_origin import is_loopback
from ..system.units import MB
from . import base

Json = dict[str, Any]

LITTLE_DISK_BYTES = 2**30  # an upstream project's dependencies are about half of it
UV_SECONDS = 10.0


class Check(base.Operation):
    """Checks the machine."""

    name = "check"
    summary = "Check what this machine offers, and what is missing."

    @staticmethod
    def run(payload: base.Payload, context: base.OperationContext) -> Json:
        """`{"python", "limits", "cgroups", "uv", "disk", "environments", …}`."""
        found: Json = {
            "python": {"version": platform.python_version(), "executable": sys.executable},
            "limits": _limits(),
            "cgroups": _cgroups(),
            "uv": _uv(),
            "disk": _disk(context.home),
            "environments": sorted(bundled()),
            "exposed": _exposed(context.home),
            "failing": _failing(context.home),
        }
        return {**found, "problems": list(problems(found))}


def problems(found: Json) -> Iterator[Json]:
    """What a user should know, each with what to do."""
    if not found["cgroups"]["available"]:
        yield {
            "message": f"no memory cgroups: {found['cgroups']['why_not']}",
            "hint": "memory limits of replicas are watched, not enforced by the kernel",
        }
    if found["uv"]["path"] is None:
        yield {"message": found["uv"]["why_not"], "hint": "pip install uv"}
    for name, host in found["exposed"].items():
        yield {
            "message": f"{name} listens on {host}, which other machines may reach",
            "hint": "its token is all that keeps them out; without --host it listens on loopback",
        }
    for name, cause in found["failing"].items():
        yield {
            "message": f"{name} is ready, but its sessions fail: {cause}",
            "hint": f"openenv logs {name}",
        }
    if found["disk"]["free_bytes"] < LITTLE_DISK_BYTES:
        free_mb = found["disk"]["free_bytes"] / MB
        yield {
            "message": f"{free_mb:.0f} MB are free in {found['disk']['path']}",
            "hint": "projects' dependencies are installed there; make room, or set OPENENV_HOME",
        }


def _exposed(home: Path) -> Json:
    """The addresses of environments that other machines may reach, by name."""
    found = run_files.all_of(Layout(home).runs)
    return {r.environment: r.host for r in found if not is_loopback(r.host)}


def _failing(home: Path) -> Json:
    """Why the sessions of an environment fail, by its name; only of those whose do."""
    found = run_files.all_of(Layout(home).runs)
    causes = {
        r.environment: (read_status_file(r.run_dir) or {}).get("sessions_fail") for r in found
    }
    return {name: cause for name, cause in causes.items() if cause}


def _limits() -> Json:
    from ..processes.resources.limits import read_limits

    return asdict(read_limits())


def _cgroups() -> Json:
    from ..system.cgroups import CgroupManager

    manager = CgroupManager("check")
    manager.remove()
    return {"available": manager.available, "why_not": manager.why_not or None}


def _uv() -> Json:
    try:
        path = find_uv()
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=UV_SECONDS, check=True
        )
    except (PreparationFailed, OSError, subprocess.SubprocessError) as exc:
        return {"path": None, "version": None, "packages_from": None, "why_not": str(exc)}
    return {
        "path": path,
        "version": done.stdout.strip(),
        "packages_from": package_source(),
        "why_not": None,
    }


def _disk(home: Path) -> Json:
    usage = shutil.disk_usage(home)
    return {"path": str(home), "free_bytes": usage.free, "total_bytes": usage.total}
