# SPDX-License-Identifier: Apache-2.0
"""Names that are given to environments, and sources that name nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from openenvd.cli import exit_codes
from openenvd.cli.commands.launch import check_name
from openenvd.environments.sources.resolve import check_source
from openenvd.schema.errors import UnknownSource
from openenvd.schema.spec import suggest_name


@pytest.mark.parametrize("text", ["Ünï Cöde", "../escape", "...", "", "a" * 200, "-x-"])
def test_a_cleaned_name_is_valid(text: str) -> None:
    assert check_name(suggest_name(text))


@pytest.mark.parametrize("name", ["../escape", "Ä", "", ".x", "a b", "a" * 64, "a\n"])
def test_an_invalid_name_is_refused_with_one_that_is_allowed(name: str) -> None:
    with pytest.raises(click.BadParameter, match=f"{suggest_name(name)!r} could be one"):
        check_name(name)


@pytest.mark.parametrize("name", ["sameName", "MyEnv-2", "_private"])
def test_names_of_upstreams_projects_and_of_docker_are_allowed(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("source", ["ech", "/nope", "nomodule:Class"])
@pytest.mark.parametrize("command", ["launch", "image build", "test"])
def test_a_source_that_names_nothing_is_refused_before_a_daemon_is_started(
    process: Callable[..., subprocess.Popen[str]], tmp_path: Path, command: str, source: str
) -> None:
    refused = process(*command.split(), source, OPENENV_HOME=str(tmp_path))
    with pytest.raises(UnknownSource) as caught:
        check_source({"source": source})
    _, told = refused.communicate()
    assert told == f"error: {caught.value.message}\n  {caught.value.hint}\n"
    assert refused.returncode == exit_codes.USAGE
    assert not (tmp_path / "daemon.log").exists()
