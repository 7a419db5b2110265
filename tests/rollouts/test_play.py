# SPDX-License-Identifier: Apache-2.0
"""Environments that are played by hand, at a real env host."""

from pathlib import Path

import pytest

from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.play import CallFailed, Game
from openenvd.rollouts.session.session import SessionFailed

from .conftest import Serve, address_of


def lengths(folder: Path) -> list[int]:
    return [len(list(episode.steps())) for episode in open_rollouts(folder)]


def test_every_episode_of_a_game_is_saved_once_and_the_one_that_is_named_as_a_pytest(
    serve: Serve, tmp_path: Path
) -> None:
    game, folder = Game(address_of(serve()), "walk", "worlds:Walk"), tmp_path / "played"
    with pytest.raises(CallFailed, match="nothing was played"):
        game.save(folder)
    for seed, steps in (1, 2), (2, 0), (3, 1):  # the second has nothing to save
        game.reset({"seed": seed})
        for size in range(steps):
            game.step({"size": size})
    assert game.save(folder) == {"episodes": 2, "steps": 3}
    assert [each.row["seed"] for each in open_rollouts(folder)] == [1, 3]
    assert game.save(folder) == {"episodes": 0, "steps": 0}, "they are there"
    game.step({"size": 7})
    assert game.save(folder) == {"episodes": 1, "steps": 2}
    assert lengths(folder) == [2, 1, 2]
    assert game.save(tmp_path / "other") == {"episodes": 2, "steps": 4}
    assert game.save(tmp_path / "first.py", 0) == {"episodes": 1, "steps": 2}
    assert '"seed": 1' in (tmp_path / "first.py").read_text()
    assert game.save(tmp_path / "last.py") == {"episodes": 1, "steps": 2}
    assert '"seed": 3' in (tmp_path / "last.py").read_text()
    with pytest.raises(CallFailed, match="the last episode is 1"):
        game.save(tmp_path / "none.py", 2)
    with pytest.raises(CallFailed, match="File exists"):
        game.save(tmp_path / "last.py")
    game.close()
    with pytest.raises(SessionFailed):
        game.step({})
    game.reset({})  # opens a session
    game.close()


def test_a_game_tells_what_the_environment_refused_or_raised(serve: Serve) -> None:
    game = Game(address_of(serve()), "walk", "worlds:Walk")
    with pytest.raises(CallFailed, match="reset begins an episode"):
        game.step({"size": 1})
    game.reset({})
    with pytest.raises(CallFailed, match="valid integer") as refused:
        game.step({"size": "x"})
    assert refused.value.field == "size"
    with pytest.raises(
        CallFailed, match=r"^RuntimeError: the floor is missing .*worlds\.py:"
    ) as raised:
        game.step({"what": "raise"})
    assert raised.value.hint == "openenv logs walk"
    game.close()
