# SPDX-License-Identifier: Apache-2.0
"""Policies: drawn from a schema, named by the user, or a model behind a real HTTP server."""

import asyncio
import json
import random
import sys
import threading
from array import array
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from openenvd.rollouts.collector import RolloutCollector
from openenvd.rollouts.episodes import Array, Episode, EpisodeStatus, FailureReason
from openenvd.rollouts.errors import EpisodeFailed, NoEnvironment, PolicyHangs, PolicyNotFound
from openenvd.rollouts.policies.chat_policy import ChatPolicy, action_of, endpoint_of
from openenvd.rollouts.policies.policy import Decision, encoded, is_async, takes_turn
from openenvd.rollouts.policies.random_policy import sample
from openenvd.rollouts.stages.named_parts import function_named, importable, policy_named

from ..conftest import Serve, address_of

SCHEMA = {
    "type": "object",
    "required": ["kind", "count", "share", "tags", "to", "maybe"],
    "properties": {
        "kind": {"enum": ["left", "right"]},
        "count": {"type": "integer", "minimum": 3, "maximum": 5},
        "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 1},
        "to": {"$ref": "#/$defs/Point"},
        "maybe": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        "metadata": {"type": "object"},
        "extra": {"const": 7},
    },
    "$defs": {
        "Point": {
            "type": "object",
            "required": ["x"],
            "properties": {
                "x": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
            },
        }
    },
}


def test_random_actions_are_valid_by_the_schema() -> None:
    rng = random.Random(1)
    for _ in range(300):
        action = sample(SCHEMA, rng)
        assert action["kind"] in ("left", "right")
        assert 3 <= action["count"] <= 5
        assert 0 < action["share"] <= 1
        assert action["tags"]
        assert all(len(tag) >= 2 for tag in action["tags"])
        assert isinstance(action["to"]["x"], int)
        assert action["maybe"] in (None, True, False)
        assert action.get("extra", 7) == 7
        assert "metadata" not in action


async def test_a_random_policy_plays_the_same_valid_actions_again_for_a_seed(serve: Serve) -> None:
    address = address_of(serve("openenvd.env_host.bundled.echo.environment:EchoEnvironment"))
    policy = await policy_named("random", address)
    collector = RolloutCollector(address, policy, max_steps=4, seed=3)
    first, second = [
        [step.action_json for e in sorted(batch, key=by_id) for step in e.steps]
        for _ in range(2)
        async for batch in collector.batches(6, episodes=6)
    ]
    assert len(first) == 24
    assert first == second
    assert len(set(first)) > 20


def by_id(episode: Episode) -> str:
    return episode.id


async def test_a_missing_server_has_no_schema(unused_port: int) -> None:
    with pytest.raises(NoEnvironment):
        await policy_named("random", f"http://127.0.0.1:{unused_port}")


def one(observation: Any) -> Any: ...


def two(observation: Any, turn: Any) -> Any: ...


def with_default(observation: Any, temperature: float = 1.0) -> Any: ...


async def coroutine(observation: Any) -> Any: ...


class WithAsyncCall:
    async def __call__(self, observation: Any) -> Any: ...


def test_the_signature_says_whether_a_policy_takes_the_turn() -> None:
    told = [takes_turn(f) for f in (one, two, with_default, lambda o, turn=None: o, print)]
    assert told == [False, True, False, True, True]
    assert [is_async(f) for f in (one, coroutine, WithAsyncCall())] == [False, True, True]


def test_a_policy_is_found_in_the_users_folder_as_it_is_now(tmp_path: Path) -> None:
    for number in (1, 22):
        (tmp_path / "my_policy.py").write_text(f"class A:\n  def act(o): return {number}\n")
        with importable(tmp_path):
            assert function_named("my_policy:A.act")(None) == number
    assert "my_policy" not in sys.modules
    assert str(tmp_path) not in sys.path


def test_a_policy_in_a_package_without_an_init_file_is_imported_anew(tmp_path: Path) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "__init__.py").write_text("")
    for number in range(2):
        source = f"def act(seen):\n    return {number}\n# {'x' * number}"
        (tmp_path / "outer" / "inner" / "mine.py").write_text(source)
        with importable(tmp_path):
            assert function_named("outer.inner.mine:act")({}) == number
    assert not [name for name in sys.modules if name.startswith("outer")]


def test_a_policy_whose_import_raises_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "no_policy.py").write_text("1 / 0")
    with importable(tmp_path), pytest.raises(PolicyNotFound, match="raised ZeroDivisionError"):
        function_named("no_policy:act")


@pytest.mark.parametrize(
    "name", ["json", "json:", ":loads", "json:nothing", "nowhere:f", "sys:path"]
)
def test_an_unknown_policy_is_an_error(name: str) -> None:
    with pytest.raises(PolicyNotFound):
        function_named(name)


# A model behind a real HTTP server


class Endpoint:
    """An OpenAI-compatible server that answers what it is told to."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.content = '{"message": "hello"}'
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: set[str | None] = set()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                endpoint.asked.append(json.loads(self.rfile.read(length)))
                endpoint.paths.append(self.path)
                endpoint.keys.add(self.headers.get("authorization"))
                self._answer(endpoint.statuses.pop(0) if endpoint.statuses else 200)

            def _answer(self, status: int) -> None:
                choice = {"message": {"content": endpoint.content}, "finish_reason": "stop"}
                body = json.dumps({"choices": [choice], "usage": {"total_tokens": 5}}).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, name="endpoint")
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1?model=tiny"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    started = Endpoint()
    yield started
    started.stop()


async def play(serve: Serve, endpoint: Endpoint, **options: Any) -> list[Episode]:
    address = address_of(serve("openenvd.env_host.bundled.echo.environment:EchoEnvironment"))
    policy = await policy_named(f"openai:{endpoint.url}", address)
    collector = RolloutCollector(address, policy, max_steps=2, retries=0, **options)
    return [e async for batch in collector.batches(8, episodes=3) for e in batch]


async def test_a_model_decides_and_sees_what_it_did_before(
    serve: Serve, endpoint: Endpoint
) -> None:
    episodes = await play(serve, endpoint)
    assert {e.status for e in episodes} == {EpisodeStatus.TRUNCATED}
    assert {step.action["message"] for e in episodes for step in e.steps} == {"hello"}
    assert episodes[0].steps[0].info["usage"] == {"total_tokens": 5}
    assert (set(endpoint.paths), endpoint.keys) == ({"/v1/chat/completions"}, {"Bearer secret"})
    assert {asked["model"] for asked in endpoint.asked} == {"tiny"}
    roles = {tuple(m["role"] for m in asked["messages"]) for asked in endpoint.asked}
    assert roles == {
        ("system", "user"),
        ("system", "user", "assistant", "user"),
    }
    assert "message" in endpoint.asked[0]["messages"][0]["content"]  # the schema


async def test_any_text_is_an_action_where_an_action_is_a_text(
    serve: Serve, endpoint: Endpoint
) -> None:
    endpoint.content = "I would say hi."
    episodes = await play(serve, endpoint)
    assert episodes[0].steps[0].action == {"message": "I would say hi."}


async def test_a_busy_endpoint_is_asked_again(endpoint: Endpoint) -> None:
    endpoint.statuses = [429, 503]
    policy = ChatPolicy(endpoint.url, SCHEMA, pause_seconds=0.001)
    completion = await policy.complete([{"role": "user", "content": "hello"}])
    await policy.close()
    assert completion["choices"][0]["message"]["content"] == endpoint.content
    assert len(endpoint.asked) == 3


async def test_an_endpoint_that_refuses_fails_the_episode(serve: Serve, endpoint: Endpoint) -> None:
    endpoint.statuses = [401] * 3
    failures = [e.failure for e in await play(serve, endpoint)]
    assert {f.reason for f in failures if f} == {FailureReason.POLICY_ERROR}
    address = endpoint.url.partition("?")[0]
    said = f"{address}/chat/completions answered 401 Unauthorized"
    assert all(f.message.startswith(said) for f in failures if f)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"a": 1}', {"a": 1}),
        ('Sure:\n```json\n{"a": 1}\n```', {"a": 1}),
        ('I choose {"a": 1} now', {"a": 1}),
    ],
)
def test_an_action_is_found_in_a_models_answer(text: str, action: Any) -> None:
    assert action_of(text, {}) == action


def test_a_text_has_an_action_and_an_endpoint_an_address_with_a_path() -> None:
    with pytest.raises(EpisodeFailed, match="not an action"):
        action_of("[1, 2]", {"required": ["x"], "properties": {"x": {"type": "integer"}}})
    assert endpoint_of("https://h/v1/") == ("https://h/v1/chat/completions", "")
    assert endpoint_of("http://h:1/v1/chat/completions?model=a/b") == (
        "http://h:1/v1/chat/completions",
        "a/b",
    )
    with pytest.raises(PolicyNotFound):
        endpoint_of("v1")


async def test_a_plain_function_may_return_an_awaitable(serve: Serve) -> None:
    async def act() -> dict[str, str]:
        return {"what": "go"}

    collector = RolloutCollector(address_of(serve()), lambda _: act())
    episodes = [e async for batch in collector.batches(2, episodes=2) for e in batch]
    assert [e.failure for e in episodes] == [None, None]


def test_an_array_of_any_type_is_measured_in_bytes() -> None:
    numbers = array("d", [1.0, 2.0])
    told = encoded(Decision({}, {}, {"a": Array(numbers, "<f8", (2,))}))  # type: ignore[arg-type]
    assert told.arrays["a"].size_bytes == 16


async def test_a_slow_policy_fails_one_attempt_and_the_next_may_succeed(
    serve: Serve,
) -> None:
    asked: list[str] = []

    async def slow_at_first(observation: Any) -> Any:
        asked.append(observation["episode"])
        if len(asked) == 1:
            await asyncio.Event().wait()
        return {"what": "go"}

    collector = RolloutCollector(
        address_of(serve()), slow_at_first, policy_timeout_seconds=0.5, retries=1
    )
    [[episode]] = [batch async for batch in collector.batches(1, episodes=1)]
    assert (episode.failure, episode.attempts) == (None, 2)
    assert collector.stats.retried == {"policy_timed_out": 1}


async def test_hung_synchronous_policies_do_not_stop_other_episodes(serve: Serve) -> None:
    let_go = threading.Event()

    def hang_at_times(observation: Any) -> Any:
        if observation["episode"] < "000004":
            let_go.wait()
        return {"what": "go"}

    collector = RolloutCollector(
        address_of(serve()), hang_at_times, policy_timeout_seconds=0.2, retries=0, concurrency=2
    )
    try:
        episodes = [e async for batch in collector.batches(20, episodes=20) for e in batch]
    finally:
        let_go.set()
    reasons = {e.id: e.failure and e.failure.reason for e in episodes}
    hung = {f"{n:06}" for n in range(4)}
    assert {i for i, reason in reasons.items() if reason is not None} == hung
    assert {reasons[i] for i in hung} == {FailureReason.POLICY_TIMED_OUT}
    assert collector.stats.hung_calls == 4


async def test_a_policy_whose_calls_all_hang_ends_the_rollout(serve: Serve) -> None:
    let_go = threading.Event()
    collector = RolloutCollector(
        address_of(serve()), lambda _: let_go.wait(), policy_timeout_seconds=0.1, retries=0
    )
    try:
        with pytest.raises(PolicyHangs):
            _ = [batch async for batch in collector.batches(1, episodes=100)]
    finally:
        let_go.set()
