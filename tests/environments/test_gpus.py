# SPDX-License-Identifier: Apache-2.0
"""Which GPUs there are, and which a replica gets."""

import os
from pathlib import Path

import pytest

from openenvd.environments.engines.host_options import find_gpus, named, share
from openenvd.schema.errors import InvalidSpec

NOBODY = {"PATH": "/no/such/folder"}


def test_a_machine_without_any_has_none(tmp_path: Path) -> None:
    assert find_gpus(NOBODY, tmp_path) == ()


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0,1", ("0", "1")),
        (" 3 , GPU-8f2c ", ("3", "GPU-8f2c")),
        ("", ()),
        ("-1", ()),
        ("0,-1,2", ("0",)),
        ("NoDevFiles", ()),
    ],
)
def test_cuda_visible_devices_limits_the_gpus(text: str, devices: tuple[str, ...]) -> None:
    assert named(text) == devices
    assert find_gpus({"CUDA_VISIBLE_DEVICES": text}) == devices


@pytest.mark.parametrize(
    ("folder", "names", "devices"),
    [
        ("proc/driver/nvidia/gpus", ("0000:01:00.0", "0000:02:00.0"), ("0", "1")),
        ("dev", ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"), ("0", "1")),
    ],
)
def test_the_driver_or_its_device_files_are_counted(
    tmp_path: Path, folder: str, names: tuple[str, ...], devices: tuple[str, ...]
) -> None:
    for name in names:
        (tmp_path / folder / name).mkdir(parents=True)
    assert find_gpus(NOBODY, tmp_path) == devices


def test_nvidia_smi_is_asked_where_the_driver_lists_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA L4 (UUID: GPU-1)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_gpus(dict(os.environ), tmp_path) == ("0",)


@pytest.mark.parametrize(
    ("gpus", "ordinal", "devices"),
    [(1, 0, ("0",)), (1, 3, ("3",)), (1, 5, ("1",)), (2, 1, ("2", "3")), (4, 1, tuple("0123"))],
)
def test_replicas_take_devices_in_turn(gpus: int, ordinal: int, devices: tuple[str, ...]) -> None:
    assert share(("0", "1", "2", "3"), gpus, ordinal) == devices


def test_a_missing_gpu_is_refused_with_a_hint() -> None:
    with pytest.raises(InvalidSpec, match="there is no GPU here") as raised:
        share((), 1, 0)
    hint = raised.value.hint or ""
    assert "leave --gpus (or gpus in openenv.yaml) out" in hint
    assert "--provider" not in hint  # there is no other provider
