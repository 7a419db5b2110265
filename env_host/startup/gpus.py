# SPDX-License-Identifier: Apache-2.0
"""Which GPU a shard works on: `CUDA_VISIBLE_DEVICES`, set before its first session.

The caller of the env host makes sure that the devices exist, and may name those of this replica in
the same variable; without it, they are counted from 0.
"""

from __future__ import annotations

import os

VARIABLE = "CUDA_VISIBLE_DEVICES"


def device_of(index: int, gpus: int, visible: str | None) -> str:
    """Return the device of the shard or session `index`; shards take turns."""
    named = [device.strip() for device in (visible or "").split(",") if device.strip()][:gpus]
    devices = named or [str(number) for number in range(gpus)]
    return devices[index % len(devices)]


def pin(index: int, gpus: int) -> None:
    """Let this process, and what it starts, see its own device alone; without GPUs, do nothing."""
    if gpus > 0:
        os.environ[VARIABLE] = device_of(index, gpus, os.environ.get(VARIABLE))
