# SPDX-License-Identifier: Apache-2.0
"""Branches and checkpoints of sessions, over `/ws` and `/mcp`."""

import hashlib
import importlib
import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from openenvd.env_host.errors import BranchRefused
from openenvd.env_host.sessions import branches
from openenvd.env_host.sessions.branches import Checkpoint, Checkpoints, check_memory
from openenvd.env_host.sessions.copying import Reason, Tier, examine

from ..conftest import StartHost
from ..hosts import Client, Host, Json

PLAIN = """
import random
from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

class Do(Action):
    by: int = 1

class Seen(Observation):
    at: int = 0
    drawn: float = 0.0
    picture: str = ""

class Walk(Environment[Do, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.rng, self.at, self.path = random.Random(1), 0, []

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.rng, self.at, self.path = random.Random(seed), 0, []
        return Seen()

    def step(self, action, timeout_s=None, **kwargs):
        self.path.append(action.by)
        self.at = sum(self.path)
        return Seen(at=self.at, drawn=self.rng.random())

    @property
    def state(self):
        return State(step_count=len(self.path))

class AsyncWalk(Walk):
    async def reset_async(self, seed=None, episode_id=None, **kwargs):
        return self.reset(seed)

    async def step_async(self, action, timeout_s=None, **kwargs):
        return self.step(action)

class Large(Walk):
    def step(self, action, timeout_s=None, **kwargs):
        return Seen(at=action.by, picture="x" * 70_000)
"""
MODULE = """
import random, socket, subprocess, sys, threading
from plain_walks import *

SHARED = []

class Declared(Walk):
    BRANCH = "copy"

    def __init__(self):
        super().__init__()
        self.key = lambda: 0

class Exporting(Walk):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def export_state(self):
        return {"path": self.path, "at": self.at, "rng": self.rng}

    def import_state(self, state):
        vars(self).update(state)

class Gym(Exporting):
    export_state = import_state = None

    def get_state(self):
        return Exporting.export_state(self)

    def set_state(self, state):
        Exporting.import_state(self, state)

class threads_(Walk):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

class children_(Walk):
    def __init__(self):
        super().__init__()
        self.program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

class sockets_(Walk):
    def __init__(self):
        super().__init__()
        self.peers = {"one": [socket.socket()]}

class files_(Walk):
    def __init__(self):
        super().__init__()
        self.log = open("log", "a")

class shared_state_(Walk):
    def __init__(self):
        super().__init__()
        self.world = SHARED

class Single(Walk):
    SUPPORTS_CONCURRENT_SESSIONS = False

class Uncopyable(Declared):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
"""

TIERS = {
    "Walk": "copy",
    "AsyncWalk": "copy",
    "Declared": "copy",
    "Exporting": "state",
    "Gym": "state",
}


@pytest.fixture(autouse=True)
def module(tmp_path: Path) -> None:
    (tmp_path / "plain_walks.py").write_text(PLAIN)
    (tmp_path / "walks.py").write_text(MODULE)


def step(client: Client, by: int = 1) -> Json:
    answer = client.ask("step", {"by": by})
    assert answer["type"] == "observation", answer
    return dict(answer["data"]["observation"])


def branch(client: Client, **data: Any) -> list[str]:
    answer = client.ask("branch", data)
    assert answer["type"] == "branches", answer
    return [each["session_id"] for each in answer["data"]["branches"]]


def attach(host: Host, session_id: str) -> Client:
    return host.open(f"/ws?session_id={session_id}")


@pytest.mark.parametrize(("name", "tier"), TIERS.items())
def test_branches_and_parent_answer_the_same_actions_alike_and_go_their_own_ways(
    serve: StartHost, name: str, tier: str
) -> None:
    host = serve(f"walks:{name}")
    with host.open() as parent, ExitStack() as stack:
        parent.ask("reset", {"seed": 7})
        step(parent, 2)
        answer = parent.ask("branch", {"count": 2})["data"]
        assert answer["by"] == tier
        ids = [each["session_id"] for each in answer["branches"]]
        one, other = (stack.enter_context(attach(host, each)) for each in ids)
        expected = step(parent)
        assert expected["at"] == 3
        assert step(one) == step(other) == expected
        step(one, 10)
        assert [step(each)["at"] for each in (parent, one, other)] == [4, 14, 4]
        assert parent.ask("state")["data"]["step_count"] == 3


@pytest.mark.parametrize("name", ["Walk", "Exporting"])
def test_random_numbers_of_branches_are_fresh_or_from_seeds(serve: StartHost, name: str) -> None:
    host = serve(f"walks:{name}")
    with host.open() as parent, ExitStack() as stack:
        parent.ask("reset", {"seed": 7})
        ids = [*branch(parent, count=2, rng="fresh"), *branch(parent, seeds=[5, 6, 5])]
        drawn = [step(stack.enter_context(attach(host, each)))["drawn"] for each in ids]
        assert drawn[2] == drawn[4]
        assert len({*drawn, step(parent)["drawn"]}) == len(drawn)


@pytest.mark.parametrize("reason", ["threads", "children", "sockets", "files", "shared_state"])
def test_a_refusal_says_why_and_leaves_the_session_untouched(serve: StartHost, reason: str) -> None:
    with serve(f"walks:{reason}_").open() as client:
        client.ask("reset", {"seed": 7})
        for kind in ("branch", "checkpoint"):
            told = client.ask(kind, {})["data"]
            assert (told["code"], told["reason"]) == ("BRANCH_UNSUPPORTED", reason)
            assert told["found"]
            assert "export_state" in told["message"]
        assert client.ask("step", {})["type"] == "observation"


@pytest.mark.parametrize(
    ("name", "config"),
    [("Single", {"isolate": False}), ("Uncopyable", {})],
)
def test_what_cannot_be_in_a_process_twice_has_no_copy(
    serve: StartHost, name: str, config: dict[str, Any]
) -> None:
    with serve(f"walks:{name}", **config).open() as client:
        assert client.ask("branch", {})["data"]["code"] == "BRANCH_UNSUPPORTED"
        client.ask("reset", {})
        assert step(client)["at"] == 1


def test_all_branches_are_made_or_none(serve: StartHost) -> None:
    host = serve("walks:Walk", max_sessions=3)
    with host.open() as parent:
        assert parent.ask("branch", {"count": 3})["data"]["code"] == "CAPACITY_REACHED"
        assert host.http("GET", "/capacity")[1]["sessions"] == 1
        assert len(branch(parent, count=2)) == 2
        assert parent.ask("branch", {})["data"]["code"] == "CAPACITY_REACHED"


def test_a_branch_ends_with_its_client_and_without_one_after_its_time(serve: StartHost) -> None:
    host = serve("walks:Walk")
    with host.open() as parent:
        parent.ask("reset", {})
        [kept] = branch(parent, ttl_s=30)
        with attach(host, kept) as client:
            [late] = branch(parent, ttl_s=0.05)
            host.until(lambda capacity: capacity["sessions"] == 2)
            with attach(host, late) as refused:
                assert refused.receive()["data"]["code"] == "SESSION_ERROR"
            assert step(client)["at"] == 1
        host.until(lambda capacity: capacity["sessions"] == 1)
        assert step(parent)["at"] == 1


@pytest.mark.parametrize(
    "data",
    [
        {"count": 0},
        {"rng": "other"},
        {"ttl_s": 0},
        {"further": 1},
        {"seeds": ["x"]},
        {"count": 3, "seeds": [1]},
    ],
)
def test_an_invalid_request_is_answered_and_the_session_continues(
    serve: StartHost, data: Json
) -> None:
    with serve("walks:Walk").open() as client:
        assert client.ask("branch", data)["data"]["code"] == "VALIDATION_ERROR"
        assert client.ask("restore", {})["data"]["code"] == "VALIDATION_ERROR"
        assert client.ask("reset", {})["type"] == "observation"


@pytest.mark.parametrize("name", TIERS)
def test_a_session_returns_to_a_checkpoint_as_often_as_it_likes(
    serve: StartHost, name: str
) -> None:
    host = serve(f"walks:{name}")
    with host.open() as client:
        client.ask("reset", {"seed": 3})
        seen = client.ask("step", {"by": 4})
        made = client.ask("checkpoint")["data"]
        assert made["by"] == TIERS[name]
        node = {"checkpoint_id": made["checkpoint_id"]}
        nexts = []
        for _ in range(3):
            nexts.append(step(client))
            step(client, 50)
            assert client.ask("restore", node) == seen
        assert nexts == nexts[:1] * 3
        with attach(host, *branch(client)) as other:
            step(other, 9)
            assert other.ask("restore", node) == seen
            client.leave()
            host.until(lambda capacity: capacity["sessions"] == 1)
            told = other.ask("restore", node)["data"]
            assert told["code"] == "CHECKPOINT_UNKNOWN"
            assert step(other)["at"] == 5


@pytest.mark.parametrize(
    ("config", "tier"), [({"shards": 2}, "copy"), ({"isolate": True, "max_sessions": 8}, "fork")]
)
def test_the_same_over_json_rpc(serve: StartHost, config: dict[str, Any], tier: str) -> None:
    host = serve("walks:Walk", **config)
    own = host.create_session()
    made = host.rpc("openenv/session/branch", session_id=own, count=2)["result"]
    assert made["by"] == tier
    node = host.rpc("openenv/session/checkpoint", session_id=own)["result"]["checkpoint_id"]
    with attach(host, made["branches"][0]["session_id"]) as client:
        assert step(client)["at"] == 1
    back = host.rpc("openenv/session/restore", session_id=own, checkpoint_id=node)
    assert back["result"]["done"] is False
    gone = host.rpc("openenv/session/restore", session_id=own, checkpoint_id="none")["error"]
    assert gone["data"]["code"] == "CHECKPOINT_UNKNOWN"
    assert "error" in host.rpc("openenv/session/branch", session_id=own, count="many")
    with host.open("/mcp") as client:
        request = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/branch", "params": {}}
        client.connection.send(json.dumps(request))
        assert client.receive()["result"]["branches"]


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_does_what_a_model_of_it_does(serve: StartHost, seed: int) -> None:
    """The model of a session is the list of its steps since the seed."""
    draw = random.Random(seed)
    host = serve("walks:Walk", max_sessions=16)
    with ExitStack() as stack:
        first = stack.enter_context(host.open())
        first.ask("reset", {"seed": 9})
        models: dict[Client, list[int]] = {first: []}
        nodes: list[tuple[Client, str, list[int]]] = []
        for _ in range(120):
            client = draw.choice(list(models))
            match draw.choice(["step"] * 4 + ["branch", "checkpoint", "restore", "close"]):
                case "step":
                    models[client].append(by := draw.randrange(9))
                    numbers = random.Random(9)
                    drawn = [numbers.random() for _ in models[client]]
                    seen = step(client, by)
                    assert (seen["at"], seen["drawn"]) == (sum(models[client]), drawn[-1])
                case "branch" if len(models) < 16:
                    new = stack.enter_context(attach(host, *branch(client)))
                    models[new] = list(models[client])
                case "checkpoint":
                    node = client.ask("checkpoint")["data"]["checkpoint_id"]
                    nodes.append((client, node, list(models[client])))
                case "restore" if nodes:
                    maker, node, steps = draw.choice(nodes)
                    answer = client.ask("restore", {"checkpoint_id": node})
                    if maker in models:
                        assert answer["data"]["observation"]["at"] == sum(steps)
                        models[client] = list(steps)
                    else:
                        assert answer["data"]["code"] == "CHECKPOINT_UNKNOWN"
                case "close" if len(models) > 1:
                    client.leave()
                    del models[client]
        host.until(lambda capacity: capacity["sessions"] == len(models))


def test_a_large_observation_is_kept_only_from_the_first_request_to_copy_on(
    serve: StartHost,
) -> None:
    with serve("walks:Large").open() as client:
        client.ask("reset")
        for by, kept in ((1, {}), (2, None)):
            seen = client.ask("step", {"by": by})["data"]["observation"]
            node = client.ask("checkpoint")["data"]["checkpoint_id"]
            restored = client.ask("restore", {"checkpoint_id": node})["data"]["observation"]
            assert restored == (seen if kept is None else kept)


def test_only_the_last_checkpoints_are_kept_each_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(branches, "MAX_CHECKPOINTS", 2)
    kept = Checkpoints()
    ids = [kept.add(Checkpoint("s", Tier.COPY, None, b"", True, float(n))) for n in range(3)]
    assert kept.find(ids[2], 2.0).made_at == 2.0
    with pytest.raises(BranchRefused, match="was dropped: the last 2"):
        kept.find(ids[0], 2.0)
    with pytest.raises(BranchRefused, match="was dropped"):
        kept.find(ids[1], 1.5 + branches.CHECKPOINT_SECONDS)
    kept.drop_of("s")
    with pytest.raises(BranchRefused, match="ends with the session"):
        kept.find(ids[2], 2.0)


def test_copies_that_do_not_fit_into_the_free_memory_are_refused() -> None:
    check_memory(10, 10, 100)
    check_memory(10, 10, None)
    with pytest.raises(BranchRefused) as refused:
        check_memory(10, 11, 100)
    assert refused.value.code == "BRANCH_MEMORY"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("import random", "random.random()"),
        ("import random", "(random.Random(), random.randint(1, 2))"),
        ("import random", "self.rng = random"),
        ("from random import randint", "randint(1, 2)"),
        ("SEEN = []", "SEEN.append(1)"),
        ("import functools\nSEEN = []", "functools.partial(SEEN.append)(1)"),
        ("", "type(self).at += 1"),
        ("import tempfile", "tempfile.mkdtemp()"),
    ],
)
def test_a_class_whose_modules_may_keep_a_state_is_not_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, body: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    number = hashlib.sha256((head + body).encode()).hexdigest()[:8]
    kept, plain = f"kept_{number}", f"plain_{number}"
    text = "\nclass Walk:\n    at = 0\n    def step(self):\n        "
    (tmp_path / f"{kept}.py").write_text(head + text + body)
    (tmp_path / f"{plain}.py").write_text(text + "return 1")
    found = [examine(importlib.import_module(each).Walk()).obstacles for each in (kept, plain)]
    assert [reason for reason, _ in found[0]] == [Reason.SHARED_STATE]
    assert found[1] == []
