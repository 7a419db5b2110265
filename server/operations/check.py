# SPDX-License-Identifier: Apache-2.0
"""`check`: what this machine offers, what is missing, and what slows it down.

    uv              installs projects' dependencies
    open files      each session is a descriptor
    memory cgroups  without them, memory limits are watched, and not enforced by the kernel
    kernel log      names the process that the kernel killed for memory, without doubt
    disk            projects' dependencies are installed there

Each check reads the machine, and passes plain values to a function that judges them.

`probe`: an environment answers.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from pydantic import Field

from ...env_host.startup import sessions_of_process
from ...environments import run_files
from ...environments.access import ask, base_url_by_name
from ...environments.engines.base import Check as EngineCheck
from ...environments.engines.registry import check_engines, check_provider
from ...environments.gateway import process as gateway_process
from ...environments.preparation.uv import find_uv, package_source
from ...environments.run_files import LOCAL
from ...schema.errors import EnvironmentsError
from ...schema.layout import Layout
from ...schema.protocol import DEFAULT_SESSIONS
from ...system.memory.cgroups import CgroupManager
from ...system.net.access import without_token
from ...system.text.json_lines import Json
from ...system.text.units import MB
from . import base

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
        """`{"python", "limits", "providers", "gateway", "machine", "used_providers"}`.

        For one provider, only `{"providers"}`.
        """
        from ...system.memory.limits import read_limits

        local = {LOCAL: asdict(EngineCheck())}
        if payload.provider is not None:
            name = check_provider(payload.provider)
            return {"providers": local if name == LOCAL else check_engines(name)}
        replicas = run_files.all_of(Layout(context.home).runs)
        return {
            "python": {"version": platform.python_version(), "executable": sys.executable},
            "limits": asdict(read_limits()),
            "providers": {**local, **check_engines()},
            "gateway": _gateway(context.home),
            "machine": look(context.home),
            "used_providers": sorted({replica.provider for replica in replicas}),
        }


def _gateway(home: Path) -> Json:
    """Check whether a gateway can be started, and report that as for an engine."""
    try:
        wanted = gateway_process.options_of_settings(os.environ)
        check = EngineCheck(version=gateway_process.check_here(Layout(home), wanted))
    except EnvironmentsError as exc:
        check = EngineCheck(problem=exc.message, remedy=exc.hint)
    return asdict(check)


def _uv() -> EngineCheck:
    try:
        done = subprocess.run(
            [find_uv(), "--version"], capture_output=True, text=True, timeout=UV_SECONDS, check=True
        )
    except (ImportError, OSError, subprocess.SubprocessError) as exc:
        return EngineCheck(problem=str(exc), remedy="pip install uv")
    return EngineCheck(notes=(f"{done.stdout.strip()}, packages from {package_source()}",))


KMSG = "/dev/kmsg"
LITTLE_DISK_BYTES = 2**30  # an upstream project's dependencies are about half of it
MANY_FILES = 1_048_576  # what container runtimes and systemd's daemons give


def look(home: Path) -> Json:
    """Check everything: by name, as for engines, `{"version", "problem", "remedy", "notes"}`."""
    planned = sum(each.max_sessions or 0 for each in run_files.all_of(Layout(home).runs))
    manager = CgroupManager("check")
    manager.remove()
    why_not = "" if manager.available else manager.why_not
    looks = {
        "uv": _uv(),
        "open files": open_files(
            resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            max(planned, DEFAULT_SESSIONS),
            os.cpu_count() or 1,
        ),
        "memory cgroups": cgroups(why_not, is_container=is_in_container()),
        "kernel log": kernel_log(_kernel_log_error(), is_container=is_in_container()),
        "disk": disk(home, shutil.disk_usage(home).free),
    }
    return {name: asdict(one) for name, one in looks.items()}


def open_files(limit: int, sessions: int, cores: int) -> EngineCheck:
    """Judge the hard limit of descriptors, up to which every process of ours raises its own."""
    if limit == resource.RLIM_INFINITY:
        return EngineCheck(notes=("no limit",))
    most = sessions_of_process(limit) * cores
    note = f"{limit:,} for each process: {most:,} sessions on {cores} cores"
    if most >= sessions:
        return EngineCheck(notes=(note,))
    return EngineCheck(
        problem=f"{note}, and {sessions:,} are planned",
        remedy=f"echo '* hard nofile {MANY_FILES}' | sudo tee /etc/security/limits.d/openenvd.conf"
        "; then sign in again, and openenv stop",
    )


def cgroups(why_not: str, *, is_container: bool) -> EngineCheck:
    """Judge whether memory cgroups can be made; `why_not` is empty if they can."""
    if not why_not:
        return EngineCheck(notes=("memory limits are enforced by the kernel",))
    user = "" if os.geteuid() == 0 else "--user "
    remedy = f"openenv stop; systemd-run {user}--scope --property Delegate=yes openenv up"
    if is_container:
        remedy = "docker run --cgroupns private -v /sys/fs/cgroup:/sys/fs/cgroup:rw …"
    return EngineCheck(
        problem=f"none can be made: {why_not}",
        remedy=remedy,
        notes=("until then limits are only watched, and a short burst may not be seen",),
    )


def kernel_log(error: OSError | None, *, is_container: bool) -> EngineCheck:
    """Judge whether the kernel's log can be read."""
    if error is None:
        return EngineCheck(notes=("names what the kernel killed for memory",))
    remedy = "sudo sysctl kernel.dmesg_restrict=0"
    if is_container:
        remedy = "docker run --device /dev/kmsg --cap-add SYSLOG …"
    return EngineCheck(
        problem=f"{KMSG} cannot be read ({error.strerror}): where there are no memory cgroups, "
        "a kill for memory is reported as probable",
        remedy=remedy,
    )


def disk(home: Path, free_bytes: int) -> EngineCheck:
    """Judge whether there is room for projects' dependencies."""
    if free_bytes >= LITTLE_DISK_BYTES:
        return EngineCheck(notes=(f"{free_bytes / MB:,.0f} MB free in {home}",))
    return EngineCheck(
        problem=f"{free_bytes / MB:.0f} MB are free in {home}",
        remedy="openenv prune, uv cache clean; or set OPENENV_HOME to a larger disk",
    )


def _kernel_log_error() -> OSError | None:
    try:
        os.close(os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as exc:
        return exc
    return None


def is_in_container() -> bool:
    """Return whether this runs in a container, by the files that container runtimes leave."""
    return any(Path(file).exists() for file in ("/.dockerenv", "/run/.containerenv"))


class ProbePayload(base.Payload):
    """The environment to ask."""

    name: str = Field(min_length=1, description="The environment's name.")
    timeout_seconds: float = Field(10.0, gt=0, le=600, description="Time limit.")


class Probe(base.Operation):
    """Asks `/health` once."""

    name = "probe"
    summary = "Check whether an environment answers, and how quickly."
    Payload = ProbePayload

    @staticmethod
    def run(payload: ProbePayload, context: base.OperationContext) -> Json:
        """`{"name", "address", "health", "seconds"}`: connecting included."""
        base_url = base_url_by_name(Layout(context.home).runs, payload.name)
        started = time.monotonic()
        health = ask(base_url, "/health", payload.timeout_seconds)
        seconds, address = time.monotonic() - started, without_token(base_url)[0]
        return {"name": payload.name, "address": address, "health": health, "seconds": seconds}
