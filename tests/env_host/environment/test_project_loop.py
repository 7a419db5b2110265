# SPDX-License-Identifier: Apache-2.0
"""The event loop that a project's code runs on, and libraries that are the host's alone."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from openenvd.schema.protocol import HOST_LIBRARIES

from ..conftest import StartHost

LIBRARIES = ("uvloop", "httptools")
LOOPS = """
import asyncio, importlib.util, sys
from plain import Bare, Seen


def look():
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    names = ("uvloop", "httptools")
    return {
        "visible": [n for n in names if n in sys.modules or importlib.util.find_spec(n)],
        "used": [n for n in names if f"/{n}/" in loaded],
    }


class Sync(Bare):
    def reset(self, **kwargs):
        return Seen(found=look())


class Async(Sync):
    async def reset_async(self, **kwargs):
        loop = type(asyncio.get_running_loop())
        return Seen(found=look() | {"loop": loop.__module__.partition(".")[0]})

    async def step_async(self, action):
        return Seen()
"""


def make_venv(folder: Path, *, is_projects: bool) -> Path:
    """A project's environment; uvloop and httptools are its own, or the host's."""
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    libraries = folder / HOST_LIBRARIES
    libraries.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        is_hosts = path.name.startswith(LIBRARIES) and not is_projects
        if path.suffix != ".pth":
            ((libraries if is_hosts else packages) / path.name).symlink_to(path)
    return folder / "bin" / "python"


@pytest.mark.parametrize("isolate", [False, True], ids=["shared", "isolated"])
@pytest.mark.parametrize("kind", ["Sync", "Async"])
@pytest.mark.parametrize("whose", ["project", "host", "neither"])
def test_a_project_sees_the_loop_and_the_libraries_that_are_its_own(
    start: StartHost, tmp_path: Path, whose: str, kind: str, isolate: bool
) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    python = make_venv(tmp_path / "venv", is_projects=whose == "project")
    if whose == "neither":
        for path in (tmp_path / "venv" / HOST_LIBRARIES).iterdir():
            path.unlink()
    host = start(f"loops:{kind}", venv=str(tmp_path / "venv"), isolate=isolate, python=str(python))
    host.ready()
    with host.open() as client:
        found = client.ask("reset")["data"]["observation"]["found"]
    assert found["visible"] == (list(LIBRARIES) if whose == "project" else [])
    assert found["used"] == ([] if whose == "neither" else list(LIBRARIES))
    if kind == "Async":
        assert found["loop"] == ("uvloop" if whose == "project" else "asyncio")
    assert host.stop() == 0
