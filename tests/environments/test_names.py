# SPDX-License-Identifier: Apache-2.0
"""What an environment may be called."""

from __future__ import annotations

import pytest

from openenvd.schema.errors import InvalidName
from openenvd.schema.spec import name_of_source, suggest_name, validate_name


@pytest.mark.parametrize(
    "name", ["a", "echo", "my_env", "sameName", "_a", "trial-3", "v1.2", "x" * 63]
)
def test_names_that_can_be_a_folder_and_a_label_are_taken(name: str) -> None:
    assert validate_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../escape", "a/b", "-a", "Ä", "Ächo", "a b", "a\n", "x" * 64]
)
def test_other_names_are_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(InvalidName) as caught:
        validate_name(name)
    assert caught.value.hint is not None
    assert "--name" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "told", "nearest"),
    [
        ("my env", "may not have ' '", "my-env"),
        ("sameNäme", "may not have 'ä'", "sameN-me"),
        (".Env", "may not begin with '.'", "Env"),
        ("_a/B", "may not have '/'", "_a-B"),
    ],
)
def test_the_character_that_is_not_allowed_is_named_and_the_nearest_name_offered(
    name: str, told: str, nearest: str
) -> None:
    with pytest.raises(InvalidName) as caught:
        validate_name(name)
    assert told in caught.value.message
    assert str(caught.value.hint).endswith(f"--name {nearest}")


@pytest.mark.parametrize("text", ["../escape", "Some Name", "", "...", "Ä" * 80, "x" * 80])
def test_a_suggested_name_is_valid(text: str) -> None:
    validate_name(suggest_name(text))


@pytest.mark.parametrize(
    ("source", "name"),
    [("echo", "echo"), ("/some/where/my_env", "my_env"), ("./a", "a"), ("m.n:My.Class", "class")],
)
def test_a_source_gives_its_environment_a_name(source: str, name: str) -> None:
    assert name_of_source(source) == name
