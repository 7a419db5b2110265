# SPDX-License-Identifier: Apache-2.0
"""`check`: what this machine offers, and what is missing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from pydantic import Field

from ...environments import run_files
from ...environments.engines.base import Check as EngineCheck
from ...environments.engines.providers import check_provider
from ...environments.gateway import process as gateway_process
from ...environments.preparation.uv import find_uv, package_source
from ...environments.run_files import LOCAL, RunFile
from ...environments.shim.client import read_status_file
from ...environments.sources.resolve import bundled
from ...schema.errors import EnvironmentsError, PreparationFailed
from ...schema.layout import Layout
from ...system.net.access import is_loopback
from ...system.text.json_lines import Json
from . import base, machine

UV_SECONDS = 10.0


class CheckPayload(base.Payload):
    """The things to check."""

    provider: str | None = Field(None, description="The one provider; by default everything.")


class Check(base.Operation):
    """Checks the machine."""

    name = "check"
    summary = "Check what this machine offers, and what is missing."
    Payload = CheckPayload

    @staticmethod
    def run(payload: CheckPayload, context: base.OperationContext) -> Json:
        """`{"python", "limits", "uv", "providers", "gateway", "machine", …}`.

        Of one provider `{"providers"}` alone.

        Raises:
            UnknownProvider
        """
        from ...environments.engines.check import check_engines  # what the daemon need not have
        from ...system.memory.limits import read_limits

        local = {LOCAL: asdict(EngineCheck())}
        if payload.provider is not None:
            name = check_provider(payload.provider)
            return {"providers": local if name == LOCAL else check_engines([name])}
        replicas = run_files.all_of(Layout(context.home).runs)
        found: Json = {
            "python": {"version": platform.python_version(), "executable": sys.executable},
            "limits": asdict(read_limits()),
            "uv": _uv(),
            "environments": sorted(bundled()),
            "providers": {**local, **check_engines()},
            "gateway": _gateway(context.home),
            "machine": machine.look(context.home),
            "exposed": _exposed(replicas),
            "failing": _failing(replicas),
        }
        return {**found, "problems": list(problems(found))}


def problems(found: Json) -> Iterator[Json]:
    """What a user should know beside what was found of the machine, each with what to do."""
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


def _gateway(home: Path) -> Json:
    """Whether a gateway can be started, said as of an engine."""
    try:
        wanted = gateway_process.options_of_settings(os.environ)
        check = EngineCheck(version=gateway_process.check_here(Layout(home), wanted))
    except EnvironmentsError as exc:
        check = EngineCheck(problem=exc.message, remedy=exc.hint)
    return asdict(check)


def _exposed(found: list[RunFile]) -> Json:
    """The addresses of environments that other machines may reach, by name."""
    # Behind a gateway, a replica's own address is not the one that counts.
    hosts = [(r.environment, r.data.get("spec", {}).get("host")) for r in found]
    hosts += [(r.environment, r.host) for r in found]
    return {name: host for name, host in hosts if host and not is_loopback(host)}


def _failing(found: list[RunFile]) -> Json:
    """Why the sessions of an environment fail, by its name; only of those whose do."""
    causes = {
        r.environment: (read_status_file(r.run_dir) or {}).get("sessions_fail") for r in found
    }
    return {name: cause for name, cause in causes.items() if cause}


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
