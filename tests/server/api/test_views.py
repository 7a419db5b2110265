# SPDX-License-Identifier: Apache-2.0
"""What is shown of environments and requests, from their shims' last words, and what is hidden."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from openenvd.executor.policy.memory import Shortage
from openenvd.requests_db.records import Environment, Replica, Request, RequestError
from openenvd.schema.replica import StatusLine
from openenvd.schema.states import EnvironmentState, ErrorKind, ReplicaState, RequestState, Schedule
from openenvd.server.api import views
from openenvd.server.api.routes_daemon import RECENT, worth_showing
from openenvd.server.api.routes_requests import MAX_COUNTED, reason_at, reason_of
from openenvd.system.process.exit_reason import ExitKind, ExitReason
from openenvd.system.text.safe_text import REDACTED, redact
from openenvd.system.text.units import MB

from ..conftest import oom_killed


def live(**info: Any) -> Any:
    return {"info": {"ready": True, "serving": "sessions", **info}}


@pytest.mark.parametrize(
    ("lives", "sentence"),
    [
        ([live(shards=4)], "4 shards"),
        ([live(shards=1), None], "1 shard"),
        ([live(shards=2), live(shards=2)], "4 shards"),
        ([live(shards=1, isolate=True)], "isolated: a process per session"),
        ([live(serving="as_is")], "as it is: the project's own server"),
        ([live(serving="http")], "as it is: the project's own server, which has no sessions"),
    ],
)
def test_the_sentence_counts_the_shards_of_all_replicas(lives: list[Any], sentence: str) -> None:
    view = views.serving_view(lives)
    assert view is not None
    assert view["sentence"] == sentence
    assert view["has_sessions"] == ("no sessions" not in sentence)


def capacity(*states: str, since: float | None = None) -> StatusLine:
    told: dict[str, Any] = {"shards": dict(Counter(states))}
    told |= {"held_since": since} if since else {}
    status: StatusLine = live(shards=len(states)) | {"capacity": told}
    return status


def test_shards_with_blocked_loops_are_counted_over_all_replicas() -> None:
    lives = [
        capacity("alive", "wedged", since=20.0),
        capacity("wedged", "wedged", since=10.0),
        capacity("alive", "busy"),
        live(shards=1),
    ]
    view = views.serving_view(lives)
    assert view is not None
    assert (view["shards"], view["held"]) == (7, {"shards": 3, "since": 10.0})
    view = views.serving_view([capacity("alive", "busy", "absent"), live(shards=1)])
    assert view is not None
    assert view["held"] is None


def test_nothing_is_said_before_a_replica_is_ready() -> None:
    assert views.serving_view([None, {"info": None}]) is None
    assert views.exit_views(None) == []
    assert views.exit_views({"exits": []}) == []


KILLED = oom_killed(7, 160 * MB, 300 * MB)
ISOLATED = {"isolated": True, "out_of_memory": "was killed for memory"}


SIGNALED = ExitReason(ExitKind.SIGNALED, pid=7, signal_number=9)
PROGRAM = replace(KILLED, pid=0, peak_bytes=290 * MB)
CHROME = replace(PROGRAM, victim_pid=71, victim_name="chrome")


@pytest.mark.parametrize(
    ("facts", "reason", "message"),
    [
        (
            {"shard": 2, "sessions": 3},
            SIGNALED,
            "shard 2 (pid 7) was killed by SIGKILL; 3 sessions ended with it, and it was replaced",
        ),
        (  # the limit of its whole replica
            {"shard": 0, "sessions": 1},
            KILLED,
            (
                "shard 0 (pid 7) was killed by the kernel for memory at 160 MB, pages that it "
                "shares included: its replica's processes may use 300 MB together; "
                "1 session ended with it, and it was replaced"
            ),
        ),
        ({"sessions": 1, **ISOLATED}, KILLED, "; its limit was 300 MB"),  # of its own
        (
            {"shard": 9, "sessions": 1, "isolated": True},
            None,
            "an isolated session (pid 7) exited",
        ),
        (
            {"programs": 1},
            CHROME,
            (
                "a program that the environment had started (chrome, pid 71) was killed by the "
                "kernel for memory at 290 MB, pages that it shares included: its replica's "
                "processes may use 300 MB together; "
                "the session went on"
            ),
        ),
        (
            {"programs": 3},
            PROGRAM,
            (
                "3 programs that the environment had started were killed by the kernel for "
                "memory at 290 MB, pages that it shares included: its replica's processes may use "
                "300 MB together; the session went on"
            ),
        ),
        (
            {"programs": 1, "isolated": True, "out_of_memory": True},
            PROGRAM,
            (
                "a program that an isolated session had started was killed by the kernel for "
                "memory at 290 MB; its limit was 300 MB; the session went on"
            ),
        ),
    ],
)
def test_the_exit_of_a_process_or_of_a_program_is_explained(
    facts: dict[str, Any], reason: ExitReason | None, message: str
) -> None:
    known = {} if reason is None else {"reason": reason.to_json()}
    pid = 7 if reason is None else reason.pid
    [view] = views.exit_views({"exits": [{"pid": pid, "at": 5.0, **facts, **known}]})
    assert view["message"].endswith(message)


def test_the_exit_of_a_server_is_shown_once_and_a_killed_shards_with_a_command() -> None:
    told = {"shard": 0, "pid": 7, "sessions": 1, "at": 5.0, "reason": KILLED.to_json()}
    spec = {"source": "hog_env:Hog"}
    environment = Environment("hog", spec, EnvironmentState.READY, 1.0, 1.0, request_id="a0")
    [view] = views.exit_views({"exits": [told]}, None, environment)
    assert view["hint"] == "openenv retry a0 --memory 600M"
    # The last one is the replica's own message; those before it are among its exits.
    reasons = [ExitReason(ExitKind.EXITED, pid=pid, exit_code=3).to_json() for pid in (7, 8)]
    exits = [{"server": True, "pid": one["pid"], "reason": one, "at": 1.0} for one in reasons]
    [view] = views.exit_views({"exits": exits}, reasons[1])
    assert view["message"] == "the server (pid 7) exited with code 3"


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (EnvironmentState.READY, "FAILING"),
        (EnvironmentState.DEGRADED, "DEGRADED"),
        (EnvironmentState.STOPPING, "STOPPING"),
    ],
)
def test_an_environment_that_is_ready_and_whose_sessions_fail_is_failing(
    state: EnvironmentState, shown: str
) -> None:
    environment = Environment("trial", {}, state, 1.0, 1.0, request_id="a0")
    replica = Replica("trial-0", "trial", 0, "local", ReplicaState.READY, "", 1.0)
    failing: Any = {**live(shards=1), "sessions_fail": "OSError: no licence"}
    view = views.environment_view(environment, [replica], {"trial-0": failing})
    assert (view["state"], view["sessions_fail"]) == (shown, "OSError: no licence")
    assert views.sessions_fail([live(shards=1), None, failing]) == "OSError: no licence"
    failing["sessions_fail"] = None
    assert views.environment_view(environment, [replica], {"trial-0": failing})["state"] == state


@pytest.mark.parametrize("host", [None, "127.0.0.1", "::1", "0.0.0.0", "10.0.0.1"])
@pytest.mark.parametrize("token", [None, "***"])
def test_that_clients_need_a_token_is_told(host: str | None, token: str | None) -> None:
    spec = {"host": host, "token": token}
    environment = Environment("trial", spec, EnvironmentState.READY, 1.0, 1.0)
    view = views.environment_view(environment, [], {})
    is_local = host in (None, "127.0.0.1", "::1")
    assert view["has_token"] is (token is not None or not is_local)


# What is hidden.


def test_tokens_credentials_in_urls_and_variables_of_a_patched_pod_are_hidden() -> None:
    payload = {"token": "hush", "name": "http://h?token=hush", "more_names": ["http://h?token=x&a"]}
    hidden = {"token": REDACTED, "name": f"http://h?token={REDACTED}"}
    assert redact(payload) == {**hidden, "more_names": [f"http://h?token={REDACTED}&a"]}
    assert redact({"token": None, "env": None}) == {"token": None, "env": None}
    variables = [{"name": "API_KEY", "value": "hush"}, {"name": "MODEL", "value": "small"}]
    options = ["namespace=lab", "image-pull-secret=regcred", "memory=1e3"]
    patch = {"spec": {"containers": [{"env": variables, "tty": True}]}}
    shown = redact({"engine_options": [*options, f"patch={json.dumps(patch)}"]})["engine_options"]
    variables[0]["value"] = REDACTED
    assert shown[:3] == options
    assert json.loads(shown[3].removeprefix("patch=")) == patch
    value, shown = "https://me:hush@h/r", f"https://{REDACTED}@h/r"
    assert redact({"policy": value, "source": value}) == {"policy": shown, "source": shown}
    assert redact({"more_names": [value]}) == {"more_names": [shown]}
    failed = RequestError(ErrorKind.OPERATION_ERROR, f"cannot reach {value}", hint=value)
    answer = views.error_view(failed, {})
    assert answer is not None
    assert (answer["message"], answer["hint"]) == (f"cannot reach {shown}", shown)


def test_what_replicas_say_and_why_sessions_fail_is_shown_without_secrets() -> None:
    live: StatusLine = {
        "problem": "GET https://me:hush@registry/v2: 401",
        "sessions_fail": "no db://x:hush@h",
    }
    replica = Replica("trial-0", "trial", 0, "docker", ReplicaState.STARTING, "/run", 1.0)
    sentence = f"{views.replica_view(replica, live)['message']} {views.sessions_fail([live])}"
    assert sentence == f"GET https://{REDACTED}@registry/v2: 401 no db://{REDACTED}@h"
    spec = {"env": {"API_KEY": "hush-hush"}}
    environment = Environment("trial", spec, EnvironmentState.READY, 1.0, 1.0)
    replica = Replica("trial-0", "trial", 0, "docker", ReplicaState.READY, "/run", 1.0)
    live = {"sessions_fail": "KeyError: hush-hush", "problem": "no hush-hush"}
    shown = views.environment_view(environment, [replica], {replica.id: live})
    assert shown["state"] == "FAILING"
    assert "hush" not in json.dumps(shown)


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (1, ["gpu-resource=nvidia.com/mig-1g.5gb", "x=y"], (1, "nvidia.com/mig-1g.5gb")),
        (1, ["gres=shard:2"], (1, "shard:2")),
        (None, ["gpus=0.25"], (0.25, None)),
        *((None, [option], None) for option in ("gpus=nan", "gpus=inf", "gpus=all")),
        (None, [], None),
    ],
)
def test_what_replicas_have_of_gpus_is_told_also_a_share_of_one(
    gpus: int | None, options: list[str], expected: tuple[float, str | None] | None
) -> None:
    found = views.gpus_of({"gpus": gpus, "engine_options": options})
    assert found == (None if expected is None else {"each": expected[0], "resource": expected[1]})
    assert views.gpus_of({}) is None


# What requests wait for, and which of those that have ended `status` has room for.

LONG = Schedule.LONG


@pytest.mark.parametrize(
    ("ahead", "room", "is_short", "expected"),
    [
        (0, 1, False, "about to start"),
        (3, 4, False, "about to start"),
        (4, 4, False, "queued behind 4 requests"),
        (1, 0, False, "queued behind 1 request"),
        (0, 0, False, "waiting for a free worker"),
        (0, 8, True, "waiting for a free worker"),
        (70, 8, True, "queued behind 70 requests, the first of which waits for memory"),
        (MAX_COUNTED + 1, 0, False, f"queued behind more than {MAX_COUNTED} requests"),
    ],
)
def test_the_reason_follows_from_who_is_ahead(
    ahead: int, room: int, is_short: bool, expected: str
) -> None:
    assert reason_of(ahead, room=room, is_short=is_short) == expected


@pytest.mark.parametrize("is_update", [False, True])
def test_an_update_that_waits_for_memory_says_that_it_needs_both_generations(
    is_update: bool,
) -> None:
    claimer = SimpleNamespace(shortages={"id": Shortage(210 * MB, 95 * MB)})
    deps: Any = SimpleNamespace(dispatcher=SimpleNamespace(claimer=claimer))
    request = replace(ended("launch"), payload={"replaces": "id0"} if is_update else {})
    both = "; an update needs memory for both generations at once" if is_update else ""
    expected = f"waiting for memory: needs 210 MB, 95 MB free{both}"
    assert reason_at(deps, request, 0, 1) == expected


def ended(
    operation: str, state: RequestState = RequestState.SUCCEEDED, request_id: str = "id"
) -> Request:
    schedule = Schedule.LONG if operation in ("launch", "bench") else Schedule.SHORT
    return Request(request_id, operation, schedule, {}, state, 1.0)


@pytest.mark.parametrize("operation", ["check", "down", "probe"])
def test_ended_checks_and_downs_are_left_out_of_status_unless_they_failed(operation: str) -> None:
    failed, cancelled = (ended(operation, s) for s in (RequestState.FAILED, RequestState.CANCELLED))
    assert worth_showing([ended(operation), failed, cancelled], []) == [failed, cancelled]


def test_no_launch_is_hidden_by_many_downs_or_ended_requests() -> None:
    downs = [ended("down") for _ in range(RECENT)]
    assert worth_showing([*downs, *(ended("launch") for _ in range(RECENT + 1))], []) == [
        ended("launch") for _ in range(RECENT)
    ]
    # Once: it may be among the latest ones.
    old, new = (ended("launch", RequestState.FAILED, request_id) for request_id in ("old", "new"))
    later = [ended("bench") for _ in range(RECENT - 1)]
    shown = worth_showing([new, *later, old], [new, old])
    assert shown == [new, *later, old]
