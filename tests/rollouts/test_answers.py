# SPDX-License-Identifier: Apache-2.0
"""Answers are taken apart as text; errors become typed reasons; steps take turns in the loop."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from openenvd.rollouts.answers import answer_of
from openenvd.rollouts.episode_runner import StepTurns, _info
from openenvd.rollouts.episodes import FailureReason
from openenvd.rollouts.errors import EpisodeFailed
from openenvd.rollouts.session.session import session_url


def frame(kind: str, **data: Any) -> bytes:
    return json.dumps({"type": kind, "data": data}).encode()


def test_the_observation_stays_the_received_text_beside_metadata_and_nan_becomes_null() -> None:
    text = b'{"type":"observation","data":{"observation":{"a" : [1.50, "\xc3\xa9"]},"reward":1}}'
    answer = answer_of(text)
    assert answer.observation_json == b'{"a" : [1.50, "\xc3\xa9"]}'
    assert (answer.reward, answer.done) == (1.0, False)
    assert answer.observation == {"a": [1.5, "é"]}
    answer = answer_of(frame("observation", observation={}, done=True, metadata={"a": 1}))
    assert (answer.metadata_json, answer.done) == (b'{"a": 1}', True)
    assert answer_of(frame("observation", observation={"a": float("nan")})).observation == {
        "a": None
    }


@pytest.mark.parametrize("reward", [None, 1, 0.5, True])
def test_a_reward_may_be_missing(reward: Any) -> None:
    assert answer_of(frame("observation", observation={}, reward=reward)).reward == reward


@pytest.mark.parametrize("observation", ["{}", '{"a": NaN}'])
@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("1e999", "Infinity"),
        ('"high"', '"high"'),
        ("[1]", "[1]"),
        ("1" + "0" * 400, "1" + "0" * 39 + "…"),
    ],
)
def test_a_reward_that_is_no_number_is_kept_as_text(
    observation: str, reward: str, expected: str
) -> None:
    data = f'{{"observation": {observation}, "reward": {reward}}}'
    answer = answer_of(f'{{"type": "observation", "data": {data}}}'.encode())
    assert (answer.reward, answer.odd_reward) == (None, expected)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("CAPACITY_REACHED", FailureReason.NO_CAPACITY),
        ("VALIDATION_ERROR", FailureReason.INVALID_ACTION),
        ("EXECUTION_ERROR", FailureReason.ENVIRONMENT_ERROR),
        ("FACTORY_ERROR", FailureReason.ENVIRONMENT_ERROR),
        ("INVALID_JSON", FailureReason.PROTOCOL_ERROR),
        ("a code of tomorrow", FailureReason.ENVIRONMENT_ERROR),
        (None, FailureReason.ENVIRONMENT_ERROR),
        (["no", "text"], FailureReason.ENVIRONMENT_ERROR),
    ],
)
def test_an_error_has_a_reason(code: Any, reason: FailureReason) -> None:
    with pytest.raises(EpisodeFailed, match="it broke") as caught:
        answer_of(frame("error", code=code, message="it broke"))
    assert caught.value.reason is reason


def test_an_exception_is_the_environments_whatever_its_code_and_named_with_its_line() -> None:
    origin = {"exception": "ValidationError", "place": "env.py:7, in step"}
    said = {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": [{"loc": ["x"]}]}
    with pytest.raises(EpisodeFailed) as caught:
        answer_of(frame("error", **said, **origin))
    assert caught.value.reason is FailureReason.ENVIRONMENT_ERROR
    assert str(caught.value).endswith('ValidationError: [{"loc":["x"]}] (env.py:7, in step)')


DEEP = b"[" * 5000 + b"]" * 5000


@pytest.mark.parametrize(
    "text",
    [
        b'{"type":"observation","data":{"observation":%b}}' % DEEP,
        b'{"type":"error","data":{"message":"it broke","errors":%b}}' % DEEP,
        b'{"type":"error","data":{"message":"caf\xe9"}}',
        DEEP,
        *(b"", b"no json", b"[]", b'{"type": "state", "data": {}}', b"1"),
    ],
    ids=[
        *("deep observation", "deep error", "an error that is no UTF-8", "depth alone"),
        *("nothing", "no JSON", "a list", "no observation", "a number"),
    ],
)
def test_an_unreadable_answer_fails_the_episode_and_not_the_rollout(text: bytes) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        answer_of(text)
    assert caught.value.reason is FailureReason.PROTOCOL_ERROR


def test_an_error_frame_with_an_infinite_number_is_read() -> None:
    with pytest.raises(EpisodeFailed, match="it broke"):
        answer_of(b'{"type":"error","data":{"message":"it broke","errors":[1e999]}}')


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://h:8000", "ws://h:8000/ws"),
        ("https://h/base/", "wss://h/base/ws"),
        ("ws://h/ws", "ws://h/ws"),
        ("h:8000", "ws://h:8000/ws"),
        ("http://h:1?token=abc", "ws://h:1/ws?token=abc"),
    ],
)
def test_an_address_has_one_session_url(address: str, url: str) -> None:
    assert session_url(address) == url


@pytest.mark.parametrize(
    "address",
    [
        "ftp://h",
        "http://",
        "http://:80",
        "http://h:99999",
        "http://h:abc",
        "http://[::1",
        "http://h..i",
        f"http://{'h' * 64}",
    ],
)
def test_an_invalid_address_has_no_session_url(address: str) -> None:
    with pytest.raises(ValueError, match="not the address of an environment"):
        session_url(address)


async def test_a_few_steps_are_taken_in_each_iteration_in_order() -> None:
    turns, passed, seen = StepTurns(3), list[int](), list[int]()

    async def one(number: int) -> None:
        await turns.take()
        passed.append(number)

    def look() -> None:
        seen.append(len(passed))
        if len(passed) < 12:
            asyncio.get_running_loop().call_soon(look)

    tasks = [asyncio.create_task(one(number)) for number in range(12)]
    look()
    await asyncio.gather(*tasks)
    assert passed == list(range(12))
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 3


def pairs(text: bytes) -> list[tuple[str, Any]]:
    """Names and values, in order: a name said twice is there twice."""
    found: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
    return found


@pytest.mark.parametrize(
    ("policy", "environment", "both"),
    [
        (b"{}", b"{}", []),
        (b"{}", b"null", []),
        (b'{"p":1}', b"{}", [("p", 1)]),
        (b"{}", b"7", [("metadata", 7)]),
        (b'{"p":1}', b"7", [("p", 1), ("metadata", 7)]),
        (b'{"p":"metadata"}', b"7", [("p", "metadata"), ("metadata", 7)]),
        (b'{"p":[{"metadata":1}]}', b"7", [("p", [[("metadata", 1)]]), ("metadata", 7)]),
        (b'{"metadata":1}', b"7", [("metadata", 1), ("environment_metadata", 7)]),
        (b'{"metadata":1}', b"{}", [("metadata", 1)]),
    ],
)
def test_info_has_no_name_twice_and_loses_nothing(
    policy: bytes, environment: bytes, both: list[tuple[str, Any]]
) -> None:
    assert pairs(_info(policy, environment)) == both


def test_metadata_gets_a_free_name_where_the_policy_uses_its_names() -> None:
    taken = b'{"metadata":1,"environment_metadata":2}'
    assert dict(pairs(_info(taken, b"7")))["environment_environment_metadata"] == 7
