# SPDX-License-Identifier: Apache-2.0
"""Branches and checkpoints of the SDK, tested on an env host with and without copies."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openenvd.client.errors import SessionError
from openenvd.client.session import AsyncSession, Checkpoint, Session
from openenvd.rollouts.session import branching
from openenvd.schema.protocol import HostConfig

from ..env_host.hosts import Host

# A thread of each instance of `Dice` makes it uncopyable, by whatever means.
WORLDS = """
import random, threading, uuid
from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

class Roll(Action):
    add: int = 0

class Seen(Observation):
    total: int = 0
    episode_id: str = ""

class Plain(Environment[Roll, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    BRANCH = "copy"

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.rng, self.total, self.id = random.Random(seed), 0, episode_id or uuid.uuid4().hex
        return Seen(total=self.total, episode_id=self.id)

    def step(self, action, timeout_s=None, **kwargs):
        if action.add < 0:
            raise ValueError("only upwards")
        self.total += action.add * 10 + self.rng.randrange(10)
        return Seen(total=self.total, episode_id=self.id, reward=1.0)

    @property
    def state(self):
        return State(episode_id=self.id)

class Dice(Plain):
    def __init__(self):
        self._ended = threading.Event()
        threading.Thread(target=self._ended.wait, daemon=True).start()

    def close(self):
        self._ended.set()
"""

Serve = Callable[..., Host]
TIERS = {"Dice": "replay", "Plain": "copy"}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts an env host that serves a class, with a limit on sessions."""
    hosts: list[Host] = []
    (tmp_path / "worlds.py").write_text(WORLDS)

    def start(max_sessions: int, env_class: str = "Dice") -> Host:
        paths = (str(tmp_path),)
        config = HostConfig(
            name="dice",
            env_class=f"worlds:{env_class}",
            import_paths=paths,
            max_sessions=max_sessions,
            shards=1,  # a branch takes its place in the process of its session
            admission_timeout_seconds=0.1,
        )
        hosts.append(Host(config, tmp_path))
        hosts[-1].ready()
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


@pytest.fixture(params=TIERS)
def env_class(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def address(serve: Serve, env_class: str) -> str:
    return address_of(serve(64, env_class))


def address_of(host: Host) -> str:
    return f"http://127.0.0.1:{host.port}"


def total(session: Session, add: int = 0) -> int:
    found: int = session.step({"add": add}).observation["total"]
    return found


def test_branches_continue_as_their_session_would_and_alone(address: str, env_class: str) -> None:
    with Session(address) as session:
        session.reset(seed=3)
        before = total(session, 1)
        branches = session.branch(3)
        assert session.branched_by == branches[0].branched_by == TIERS[env_class]
        assert (session.branch_refusal is not None) == (env_class == "Dice")
        seen = [total(branch, 5) for branch in branches]
        assert seen == [seen[0]] * 3
        assert total(session, 5) == seen[0] > before  # the session is where it was
        with branches[1].branch()[0] as grandchild:
            assert total(grandchild, 7) == total(session, 7)


def test_branches_end_with_their_block_and_with_their_session_unless_kept(
    serve: Serve, env_class: str
) -> None:
    host = serve(64, env_class)
    with Session(address_of(host)) as session:
        session.reset(seed=1)
        (kept,) = session.branch(keep=True)
        left, entered = session.branch(2)
        with entered:
            total(entered)
        with pytest.raises(SessionError, match="the session was closed"):
            total(entered)
        below = left.branch()[0]
    for ended in (left, below):
        with pytest.raises(SessionError, match="the session was closed"):
            total(ended)
    with kept:
        total(kept)
    host.emptied()


async def test_an_abandoned_branch_ends_and_is_forgotten(serve: Serve, env_class: str) -> None:
    host = serve(8, env_class)
    async with AsyncSession(address_of(host)) as session:
        await session.reset(seed=1)
        for _ in range(20):  # more than there are places
            for branch in await session.branch(2):
                async with branch:
                    await branch.step({"add": 1})
            await asyncio.to_thread(host.until, lambda capacity: capacity["sessions"] == 1)
        assert len(session._branches) <= 1  # the last one, which has a name here


def test_a_session_returns_to_a_checkpoint_as_often_as_it_likes(
    address: str, env_class: str
) -> None:
    with Session(address) as session:
        session.reset(seed=8)
        first = total(session, 2)
        node = session.checkpoint()
        assert node.by == session.branched_by == TIERS[env_class]
        later = [total(session, add) for add in (4, 4)]
        assert session.restore(node).observation["total"] == first
        assert [total(session, add) for add in (4, 4)] == later
        session.restore(node)
        assert total(session, 9) != later[0]
        session.reset(seed=9)
        assert session.restore(node).observation["total"] == first


def test_a_failed_step_is_repeated_too(address: str) -> None:
    with Session(address) as session:
        session.reset(seed=8)
        with pytest.raises(SessionError, match="only upwards"):
            total(session, -1)
        assert total(session.branch()[0], 1) == total(session, 1)


def test_what_cannot_be_repeated_is_refused_and_leaves_the_session(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = serve(3)
    with Session(address_of(host)) as session:
        with pytest.raises(SessionError) as caught:
            session.checkpoint()  # nothing was reset
        assert caught.value.code == "BRANCH_UNSUPPORTED"
        session.reset()  # without a seed
        for _ in range(20):
            total(session)
        with pytest.raises(SessionError, match="was answered otherwise") as caught:
            session.branch()
        assert caught.value.code == "BRANCH_DIVERGED"
        session.reset(seed=1)
        at = total(session)
        for options in ({"rng": "fresh"}, {"seeds": [1]}):
            with pytest.raises(SessionError, match="random numbers") as caught:
                session.branch(**options)
            assert caught.value.code == "BRANCH_UNSUPPORTED"
        host.until(lambda capacity: capacity["sessions"] == 1)
        with pytest.raises(SessionError) as caught:
            session.branch(8)
        assert caught.value.code == "CAPACITY_REACHED"
        host.until(lambda capacity: capacity["sessions"] == 1)  # all or none
        monkeypatch.setattr(branching, "MAX_JOURNAL_BYTES", 10)
        assert total(session) >= at
        with pytest.raises(SessionError, match="are not repeated"):
            session.branch()
        total(session)


def test_a_server_that_copies_gives_other_random_numbers_and_refuses_too_many(
    serve: Serve,
) -> None:
    with Session(address_of(serve(4, "Plain"))) as session:
        session.reset(seed=1)
        own, *alike = session.branch(3, seeds=[7, 8, 8])
        totals = [[total(branch) for _ in range(9)][-1] for branch in (own, *alike)]
        assert totals[1] == totals[2] != totals[0]
        node = session.checkpoint()
        with pytest.raises(SessionError) as caught:
            session.branch(2)
        assert caught.value.code == "CAPACITY_REACHED"
        total(session)
        with pytest.raises(SessionError) as caught:
            session.restore(dataclasses.replace(node, checkpoint_id="other"))
        assert caught.value.code == "CHECKPOINT_UNKNOWN"
        total(session)


def test_a_digest_leaves_out_what_differs_by_nature() -> None:
    one = b'{"episode_id": "a\\"b", "timestamp":1.5,"x":"episode_id"}'
    other = b'{"episode_id": "c", "timestamp":2.5,"x":"episode_id"}'
    assert branching.digest(one) == branching.digest(bytearray(other))
    assert branching.digest(one) != branching.digest(other.replace(b'"x"', b'"y"'))


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["step", "branch", "checkpoint", "restore", "close"]), st.integers(0)
    ),
    max_size=10,
)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(moves=MOVES)
def test_sessions_agree_with_a_model_of_their_history(
    address: str, moves: list[tuple[str, int]]
) -> None:
    """The model of a session is its list of actions: equal lists have equal totals."""
    totals: dict[tuple[int, ...], int] = {}
    with ExitStack() as ends, Session(address) as root:
        root.reset(seed=5)
        sessions: list[tuple[Session, tuple[int, ...]]] = [(root, ())]
        nodes: list[tuple[Checkpoint, tuple[int, ...], Session]] = [(root.checkpoint(), (), root)]
        for what, number in moves:
            at = number % len(sessions)
            session, history = sessions[at]
            if what == "step":
                history += (number % 3,)
                seen = total(session, number % 3)
                assert totals.setdefault(history, seen) == seen
                sessions[at] = session, history
            elif what == "branch":
                made = session.branch(2, keep=True)  # a branch of what is closed goes on
                sessions += [(ends.enter_context(branch), history) for branch in made]
            elif what == "checkpoint":
                nodes.append((session.checkpoint(), history, session))
            elif what == "restore":
                node, history, _ = nodes[number % len(nodes)]
                seen = session.restore(node).observation["total"]
                assert seen == totals.get(history, 0)
                sessions[at] = session, history
            elif at:  # the first one stays
                session.close()
                del sessions[at]
                nodes = [each for each in nodes if each[2] is not session]  # they end with it
