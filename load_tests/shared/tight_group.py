# SPDX-License-Identifier: Apache-2.0
"""A real cgroup of the size of a small machine, for `low_resources.py` (cgroup v1, as root)."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from load_tests.shared.report import OPENENV
from openenvd.system.units import MB

PERIOD_US = 100_000
V1 = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Size:
    """A machine to be."""

    name: str
    cpus: float
    memory_bytes: int


SIZES = {
    "small": Size("0.5 CPU, 750 MB", 0.5, 750 * MB),
    "large": Size("4 CPU, 16 GB", 4.0, 16 * 1024 * MB),
}


def why_no_group() -> str | None:
    """None where a group with limits can be made: cgroup v1, as root."""
    for controller in ("memory", "cpu"):
        folder = V1 / controller
        if not os.access(folder / "cgroup.procs", os.W_OK):
            return f"{folder} is no writable cgroup v1 hierarchy"
    return None


class Group:
    """A real cgroup with both limits; what it starts is inside from its first instruction."""

    def __init__(self, size: Size) -> None:
        name = f"openenvd-load-{os.getpid()}-{time.monotonic_ns()}"
        self._memory = V1 / "memory" / name
        self._cpu = V1 / "cpu" / name
        for folder in (self._memory, self._cpu):
            folder.mkdir()
        (self._memory / "memory.limit_in_bytes").write_text(str(size.memory_bytes))
        (self._cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._cpu / "cpu.cfs_quota_us").write_text(str(int(size.cpus * PERIOD_US)))

    def run(self, words: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """One `openenv` command, inside."""
        return self.run_program([OPENENV, *words], environ)

    def run_program(
        self, words: list[str], environ: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """One program, inside."""
        return subprocess.run(
            self.inside(words),
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def inside(self, words: list[str]) -> list[str]:
        """The command that enters, and then becomes that of `words`."""
        files = [str(folder / "cgroup.procs") for folder in (self._memory, self._cpu)]
        enter = "".join(f'echo $$ > "{file}"; ' for file in files)
        return ["/bin/sh", "-c", f'{enter} exec "$@"', "sh", *words]

    def kills(self) -> int:
        """By the kernel, for memory, in the group and in all below it."""
        total = 0
        for file in self._memory.rglob("memory.oom_control"):
            with suppress(OSError):
                words = file.read_text().split()
                total += int(words[words.index("oom_kill") + 1])
        return total

    def peak_mb(self) -> float:
        return int((self._memory / "memory.max_usage_in_bytes").read_text()) / 1e6

    def remove(self) -> None:
        """Whoever is left inside goes first."""
        for folder in (self._memory, self._cpu):
            below = sorted(folder.rglob("cgroup.procs"), key=lambda p: -len(p.parts))
            for file in below:
                _empty(file)
                with suppress(OSError):
                    file.parent.rmdir()


def _empty(procs: Path) -> None:
    for _ in range(100):
        with suppress(OSError):
            pids = procs.read_text().split()
            if not pids:
                return
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
        time.sleep(0.02)
