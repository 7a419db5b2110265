# SPDX-License-Identifier: Apache-2.0
"""Branches at upstream's own server, which makes none, and how ours are compared."""

from collections.abc import Callable
from pathlib import Path

import pytest

from openenvd.client import Session

from ..background import uvicorn
from ..conftest import UPSTREAM_REQUIREMENT, Machine, python_with
from .branches import branched, unbranched

APP = """
import random
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Roll(Action):
    add: int = 0

class Seen(Observation):
    total: int = 0

class Dice(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.rng, self.total = random.Random(seed), 0
        return Seen(total=0)

    def step(self, action, timeout_s=None, **kwargs):
        self.total += action.add * 10 + self.rng.randrange(10)
        return Seen(total=self.total, reward=1.0)

    @property
    def state(self):
        return State()

app = create_app(Dice, Roll, Seen, max_concurrent_envs=8)
"""


@pytest.mark.timeout(600)  # it may install upstream's package
def test_upstreams_server_has_branches_and_checkpoints_by_replay(tmp_path: Path) -> None:
    (tmp_path / "dice.py").write_text(APP)
    command = (python_with(UPSTREAM_REQUIREMENT), "-m", "uvicorn", "dice:app")
    server = uvicorn(command, tmp_path / "log", cwd=tmp_path)
    with server as (_, address), Session(address) as session:
        session.reset(seed=3)
        node = session.checkpoint()
        session.step({"add": 1})
        branches = session.branch(3)
        assert {branch.branched_by for branch in branches} == {"replay"}
        seen = [branch.step({"add": 2}).observation["total"] for branch in branches]
        assert seen == [session.step({"add": 2}).observation["total"]] * 3
        assert session.restore(node).observation["total"] == 0
        again = [session.step({"add": add}).observation["total"] for add in (1, 2)]
        assert again[-1] == seen[0]


SHARED = """
from openenvd.env_host.bundled.echo.environment import EchoEnvironment

class Sample(EchoEnvironment):
    BRANCH = "copy"

    def __deepcopy__(self, memo):
        return self
"""


def test_a_branch_that_shares_state_with_its_session_answers_differently(
    machine: Machine, write_environment: Callable[[str], str]
) -> None:
    machine.ok("launch", write_environment(SHARED), "--name", "shared", cwd=machine.home.parent)
    address = str(machine.environment("shared")["address"])
    calls = [("reset", {"episode_id": "one"}), ("step", {"message": "a"}), ("state", {})]
    alone = unbranched(address, calls)
    tier, reason, (parent, *branches) = branched(address, calls)
    assert (tier, reason, parent) == ("copy", "", alone)
    assert not any(answers == alone for answers in branches)
