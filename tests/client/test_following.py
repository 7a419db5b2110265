# SPDX-License-Identifier: Apache-2.0
"""A request is followed to its end, whatever happens to the stream."""

from __future__ import annotations

from typing import Any

import pytest

from openenvd.client import daemon, following
from openenvd.client.api import DaemonClient
from openenvd.client.errors import ConnectionLost, RequestFailed

from .fake_daemon import Call, FakeDaemon, new_request

RUNNING = new_request("1", state="RUNNING", finished_at=None)
DONE = new_request("1")


def test_the_final_state_comes_last_even_when_the_log_comes_after_it(
    fake: FakeDaemon, client: DaemonClient
) -> None:
    def stream(call: Call) -> None:
        call.begin_stream()
        call.event("2:0", "state", DONE)
        call.event("2:4", "log", {"text": "end\n"})
        call.end_stream()

    fake.get("/v1/requests/1/events", stream)
    assert [event.name for event in following.follow(client, "1")] == ["log", "state"]


def break_off(fake: FakeDaemon, first: list[Any], rest: list[Any]) -> list[str | None]:
    """Have the stream break off once; returns after which event each call continues."""
    asked: list[str | None] = []

    def stream(call: Call) -> None:
        asked.append(call.headers["Last-Event-ID"])
        call.begin_stream()
        for event in first if len(asked) == 1 else rest:
            call.event(*event)
        (call.break_off if len(asked) == 1 else call.end_stream)()

    fake.get("/v1/requests/1/events", stream)
    return asked


def test_a_broken_stream_is_taken_up_after_the_last_event(
    fake: FakeDaemon, client: DaemonClient
) -> None:
    first = [("1:0", "state", RUNNING), ("1:2", "log", {"text": "a\n"})]
    asked = break_off(fake, first, [("1:4", "log", {"text": "b\n"}), ("2:4", "state", DONE)])
    fake.get("/v1/requests/1", {"request": RUNNING})
    events = list(following.follow(client, "1", reconnect=lambda: daemon.find(fake.paths)))
    assert asked == [None, "1:2"]
    assert [e.data.get("text") for e in events if e.name == "log"] == ["a\n", "b\n"]
    assert events[-1].data["state"] == "SUCCEEDED"


def test_an_end_that_was_missed_is_found_with_the_rest_of_the_log(
    fake: FakeDaemon, client: DaemonClient
) -> None:
    break_off(fake, [("1:0", "state", RUNNING)], [("2:4", "log", {"text": "b\n"})])
    fake.get("/v1/requests/1", {"request": DONE})
    names = [event.name for event in following.follow(client, "1")]
    assert names == ["state", "log", "state"]


def test_a_daemon_that_does_not_return_is_reported_with_a_hint(
    fake: FakeDaemon, client: DaemonClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(call: Call) -> None:
        call.begin_stream()
        call.break_off()

    monkeypatch.setattr(following, "COME_BACK_SECONDS", 0.0)
    fake.get("/v1/requests/1/events", stream)
    with pytest.raises(ConnectionLost) as caught:
        following.wait(client, "1", reconnect=lambda: None)
    assert caught.value.hint is not None
    assert "openenv wait 1" in caught.value.hint


def test_run_raises_the_requests_error(fake: FakeDaemon, client: DaemonClient) -> None:
    error = {"kind": "operation_error", "message": "no such thing", "hint": "another"}
    failed = new_request("1", state="FAILED", error=error)
    fake.post("/v1/requests", (202, {"request_id": "1", "request": RUNNING}))
    fake.ends(failed)
    with pytest.raises(RequestFailed, match="no such thing") as caught:
        following.run(client, "check", {})
    assert caught.value.hint == "another"
