# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, and which of them a replica gets (`--gpus N`). NVIDIA's only.

`CUDA_VISIBLE_DEVICES`, where the daemon was started with it, says which may be used. Otherwise the
driver is asked for its list, and where there is none, `nvidia-smi` (the driver may be outside of a
container whose devices are inside).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ..schema.errors import InvalidSpec

VARIABLE = "CUDA_VISIBLE_DEVICES"
ASK_SECONDS = 10.0

_DRIVER = "proc/driver/nvidia/gpus"
_NONE = ("-1", "NoDevFiles", "void", "none")


def find_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """The devices that may be used, as `CUDA_VISIBLE_DEVICES` names them; empty: none."""
    if (said := environ.get(VARIABLE)) is not None:
        return named(said)
    devices = [name for name in _names_in(root / "dev") if re.fullmatch(r"nvidia\d+", name)]
    count = len(_names_in(root / _DRIVER)) or len(devices) or _of_program(environ)
    return tuple(str(number) for number in range(count))


def named(text: str) -> tuple[str, ...]:
    """Parse a value of `CUDA_VISIBLE_DEVICES`: numbers or ids, up to the first invalid one.

    CUDA does not look further either.
    """
    devices = []
    for device in (part.strip() for part in text.split(",")):
        if not device or device in _NONE:
            break
        devices.append(device)
    return tuple(devices)


def share(devices: tuple[str, ...], gpus: int, ordinal: int) -> tuple[str, ...]:
    """Choose the devices of one replica; replicas share devices only when all are taken.

    Raises:
        InvalidSpec: There are fewer devices than one replica asks for.
    """
    if not devices:
        raise InvalidSpec(
            f"--gpus {gpus}: there is no GPU here (no NVIDIA driver, no /dev/nvidia0, and no "
            "nvidia-smi that shows one)",
            "leave --gpus out, or launch on a machine that has one",
        )
    if gpus > len(devices):
        have = "1 GPU" if len(devices) == 1 else f"{len(devices)} GPUs"
        raise InvalidSpec(
            f"--gpus {gpus}: this machine has {have} ({', '.join(devices)})",
            f"--gpus {len(devices)}; several shards may share one: --gpus 1 --shards 4",
        )
    first = ordinal * gpus
    return tuple(devices[(first + number) % len(devices)] for number in range(gpus))


def _names_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def _of_program(environ: Mapping[str, str]) -> int:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            env=dict(environ),
            capture_output=True,
            text=True,
            check=True,
            timeout=ASK_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
