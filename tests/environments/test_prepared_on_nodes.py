# SPDX-License-Identifier: Apache-2.0
"""The files of what is launched, kept for nodes that make it ready themselves."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from openenvd.environments.engines.base import EngineGone
from openenvd.environments.engines.registry import address_here
from openenvd.environments.engines.slurm_reporting import SlurmReporting
from openenvd.environments.layout import Layout
from openenvd.environments.providers.prepared_on_nodes import program_for_nodes
from openenvd.environments.sources.resolve import resolve
from openenvd.environments.spec import EnvironmentSpec

MANIFEST = "spec_version: 1\nname: sample\nclass: sample:Sample\n"


def test_two_launches_at_once_keep_the_same_archive(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = tmp_path / "my_env", os.link
    folder.mkdir()
    (folder / "openenv.yaml").write_text(MANIFEST)

    def link_after_another(source: str, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_after_another)
    spec = EnvironmentSpec(name="sample", source=str(folder), provider="slurm")
    program = program_for_nodes(layout, spec, resolve(str(folder), tmp_path))
    archives = layout.home / "slurm" / "archives"
    assert program.source is not None
    assert [path.stem for path in archives.iterdir()] == [program.source["digest"]]


def test_what_a_killed_launch_has_left_is_removed_when_an_agent_begins(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    archives = layout.home / "slurm" / "archives"
    archives.mkdir(parents=True)
    for name in ("tmp1234", "0123456789abcdef0123.tar"):
        (archives / name).touch()
    monkeypatch.setenv("PATH", str(layout.home))
    environ = {"OPENENV_HOME": str(layout.home), "OPENENV_SLURM_REPORT": "127.0.0.1"}
    with contextlib.closing(SlurmReporting(environ)) as engine, pytest.raises(EngineGone):
        engine.list()  # without Slurm
    assert list(archives.iterdir()) == []


def test_the_python_of_nodes_is_the_launchs_and_makes_no_other_engine(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = []
    for python in ("openenvd/bin/python", "/opt/openenvd/bin/python"):
        monkeypatch.setenv("OPENENV_SLURM_REPORT", "10.0.0.5:7443")
        monkeypatch.setenv("OPENENV_SLURM_NODE_PYTHON", python)
        spec = EnvironmentSpec(name="echo", source="echo", provider="slurm")
        program = program_for_nodes(layout, spec, resolve("echo", tmp_path))
        assert program.source is not None
        assert program.source["python"] == python
        addresses.append(address_here("slurm"))
    assert addresses[0] == addresses[1]
