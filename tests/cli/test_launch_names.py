# SPDX-License-Identifier: Apache-2.0
"""Names that are given to environments."""

from __future__ import annotations

import click
import pytest

from openenvd.cli.launch import check_name
from openenvd.schema.names import suggest_name


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
