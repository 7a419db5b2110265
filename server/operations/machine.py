# SPDX-License-Identifier: Apache-2.0
"""What keeps this machine from its best: one look at each thing, and the command that fixes it.

    open files      each session is a descriptor
    memory cgroups  without them, memory limits are watched, and not enforced by the kernel
    kernel log      names the process that the kernel killed for memory, without doubt
    ports           of environments; the daemon's
    swap            a machine that swaps is slower than one that refuses
    disk            projects' dependencies are installed there

Each look reads the machine, and hands plain values to a function that judges.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil

from ...env_host.startup import sessions_of_process
from ...environments import run_files
from ...environments.engines.base import Check
from ...environments.engines.local.ports import FIRST_PORT, LAST_PORT
from ...schema.layout import Layout
from ...schema.protocol import DEFAULT_SESSIONS, LOOPBACK
from ...system.memory.cgroups import CgroupManager
from ...system.text.json_lines import Json
from ...system.text.units import MB

KMSG = "/dev/kmsg"
LITTLE_DISK_BYTES = 2**30  # an upstream project's dependencies are about half of it
MUCH_SWAP_SHARE = 0.25  # of the swap that there is, in use
FEW_PORTS = 16
MANY_FILES = 1_048_576  # what container runtimes and systemd's daemons give


def look(home: Path) -> Json:
    """Look at everything; by name, as of an engine: `{"version", "problem", "remedy", "notes"}`."""
    planned = sum(each.max_sessions or 0 for each in run_files.all_of(Layout(home).runs))
    looks: dict[str, Callable[[], Check]] = {
        "open files": lambda: open_files(
            resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            max(planned, DEFAULT_SESSIONS),
            os.cpu_count() or 1,
        ),
        "memory cgroups": _cgroups,
        "kernel log": _kernel_log,
        "ports": lambda: ports(_free_ports(FEW_PORTS)),
        "swap": _swap,
        "disk": lambda: disk(home, shutil.disk_usage(home).free),
    }
    return {name: asdict(one()) for name, one in looks.items()}


def open_files(limit: int, sessions: int, cores: int) -> Check:
    """Judge the hard limit of descriptors, up to which every process of ours raises its own."""
    if limit == resource.RLIM_INFINITY:
        return Check(notes=("no limit",))
    most = sessions_of_process(limit) * cores
    note = f"{limit:,} for each process: {most:,} sessions on {cores} cores"
    if most >= sessions:
        return Check(notes=(note,))
    return Check(
        problem=f"{note}, and {sessions:,} are planned",
        remedy=f"echo '* hard nofile {MANY_FILES}' | sudo tee /etc/security/limits.d/openenvd.conf"
        "; then sign in again, and openenv stop",
    )


def cgroups(why_not: str, *, is_container: bool) -> Check:
    """Judge why no memory cgroups can be made; empty: they can."""
    if not why_not:
        return Check(notes=("memory limits are enforced by the kernel",))
    user = "" if os.geteuid() == 0 else "--user "
    remedy = f"openenv stop; systemd-run {user}--scope --property Delegate=yes openenv up"
    if is_container:
        remedy = "docker run --cgroupns private -v /sys/fs/cgroup:/sys/fs/cgroup:rw …"
    return Check(
        problem=f"none can be made: {why_not}",
        remedy=remedy,
        notes=("until then limits are watched, and a burst between two looks is not seen",),
    )


def kernel_log(error: OSError | None, *, is_container: bool) -> Check:
    """Judge whether the kernel's log can be read."""
    if error is None:
        return Check(notes=("names what the kernel killed for memory",))
    remedy = "sudo sysctl kernel.dmesg_restrict=0"
    if is_container:
        remedy = "docker run --device /dev/kmsg --cap-add SYSLOG …"
    return Check(
        problem=f"{KMSG} cannot be read ({error.strerror}): where there are no memory cgroups, "
        "a kill for memory is reported as probable",
        remedy=remedy,
    )


def ports(free: int) -> Check:
    """Judge how many ports of environments are free, of which not all are looked for."""
    if free >= FEW_PORTS:
        return Check(notes=(f"{FIRST_PORT} to {LAST_PORT} for environments",))
    return Check(
        problem=f"{free} ports between {FIRST_PORT} and {LAST_PORT} are free",
        remedy="ss -ltnp lists who listens; openenv launch --port chooses another",
    )


def swap(used_bytes: int, total_bytes: int) -> Check:
    """Judge whether the machine swaps."""
    if not total_bytes:
        return Check(notes=("none: what does not fit is refused or killed, and never slow",))
    note = f"{used_bytes / MB:.0f} of {total_bytes / MB:.0f} MB in use"
    if used_bytes < MUCH_SWAP_SHARE * total_bytes:
        return Check(notes=(note,))
    return Check(
        problem=f"{note}: steps of sessions that were swapped out wait for the disk",
        remedy="sudo swapoff -a, when as much memory is free; sudo sysctl vm.swappiness=1",
    )


def disk(home: Path, free_bytes: int) -> Check:
    """Judge whether there is room for projects' dependencies."""
    if free_bytes >= LITTLE_DISK_BYTES:
        return Check(notes=(f"{free_bytes / MB:,.0f} MB free in {home}",))
    return Check(
        problem=f"{free_bytes / MB:.0f} MB are free in {home}",
        remedy="openenv prune, uv cache clean; or set OPENENV_HOME to a larger disk",
    )


def _cgroups() -> Check:
    manager = CgroupManager("check")
    manager.remove()
    why_not = "" if manager.available else manager.why_not
    return cgroups(why_not, is_container=is_in_container())


def _kernel_log() -> Check:
    error = None
    try:
        os.close(os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as exc:
        error = exc
    return kernel_log(error, is_container=is_in_container())


def _swap() -> Check:
    found = psutil.swap_memory()
    return swap(found.used, found.total)


def _free_ports(enough: int) -> int:
    """Count the free ports of environments, until there are enough."""
    free = 0
    for port in range(FIRST_PORT, LAST_PORT + 1):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
            free += 1
        if free >= enough:
            break
    return free


def is_in_container() -> bool:
    """Whether a container runtime has started this, by the files that they leave."""
    return any(Path(file).exists() for file in ("/.dockerenv", "/run/.containerenv"))
