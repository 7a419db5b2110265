# SPDX-License-Identifier: Apache-2.0
"""Calls and streams over a real Unix socket."""

import asyncio
from typing import Any

import pytest

from openenvd.client import daemon, following
from openenvd.client.api import DaemonClient
from openenvd.client.errors import ApiRefused, ConnectionLost, RequestFailed
from openenvd.client.http import HttpClient, parse_events

from ..server.tracing.conftest import KeptSpans, ids_of
from ..server.tracing.conftest import kept as kept
from .fake_daemon import Call, FakeDaemon, new_request

COMMANDS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_submission_has_its_options_and_details(fake: FakeDaemon, client: DaemonClient) -> None:
    fake.post("/v1/requests", (202, {"request_id": "1", "request": new_request("1")}))
    client.submit("launch", {"name": "x"}, priority=None, timeout_seconds=5.0)
    [(_, _, body)] = fake.calls
    assert body == {"operation": "launch", "payload": {"name": "x"}, "timeout_seconds": 5.0}
    error = {"kind": "name_taken", "message": "taken", "hint": "another", "address": "http://a"}
    fake.post("/v1/requests", (409, {"error": error}))
    with pytest.raises(ApiRefused, match="taken") as caught:
        client.submit("launch", {})
    assert (caught.value.kind, caught.value.hint) == ("name_taken", "another")
    assert caught.value.details["address"] == "http://a"


def test_lists_become_a_query_and_a_name_a_path(fake: FakeDaemon, client: DaemonClient) -> None:
    fake.get("/v1/requests", {"requests": []})
    client.requests(states=["PENDING", "RUNNING"], limit=5)
    assert fake.calls[0][1] == "/v1/requests?state=PENDING&state=RUNNING&limit=5"
    with pytest.raises(ApiRefused):
        client.request("../info?x=1")
    assert fake.calls[1][1] == "/v1/requests/..%2Finfo%3Fx%3D1"
    with pytest.raises(ApiRefused, match="no environment is called"):
        client.environment("../info?x=1")
    assert len(fake.calls) == 2


def test_a_wrong_token_is_refused_and_no_listener_a_lost_connection(fake: FakeDaemon) -> None:
    with pytest.raises(ApiRefused, match="no token"):
        HttpClient(str(fake.paths.socket), "wrong").request("GET", "/v1/info")
    with pytest.raises(ConnectionLost):
        HttpClient(str(fake.paths.home / "none.sock"), "x").request("GET", "/v1/info")


def test_an_answer_that_is_not_json_is_still_an_error_of_ours(
    fake: FakeDaemon, client: DaemonClient
) -> None:
    def plain(call: Call) -> None:
        call.send_error(500)

    fake.get("/v1/info", plain)
    with pytest.raises(ApiRefused, match="HTTP 500"):
        client.info()


def test_a_chunked_log_comes_as_text_with_characters_whole(
    fake: FakeDaemon, client: DaemonClient
) -> None:
    def stream(call: Call) -> None:
        call.begin_stream("text/plain")
        halves = "é".encode()
        for half in (halves[:1], halves[1:]):
            call.wfile.write(b"1\r\n" + half + b"\r\n")
        call.end_stream()

    fake.get("/v1/requests/1/logs", stream)
    assert "".join(client.request_log("1", tail=3, since=60.0, follow=True)) == "é"
    assert fake.calls[0][1] == "/v1/requests/1/logs?tail=3&since_seconds=60.0&follow=true"


def test_keep_alives_and_half_an_event_at_a_break_are_no_events() -> None:
    lines = [b": ping\n", b"\n", b"id: 4:2\n", b"event: log\n", b'data: {"text": "a"}\n', b"\n"]
    [event] = parse_events(iter([*lines, b"id: 1:0\n", b"event: log\n", b'data: {"te']))
    assert (event.id, event.name, event.data) == ("4:2", "log", {"text": "a"})


async def test_what_changes_something_carries_the_callers_trace(
    fake: FakeDaemon, client: DaemonClient, kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[str] = []  # without the flags

    def answer(call: Call) -> None:
        heads.append(call.headers.get("traceparent", "")[:52])
        call.json(200, {"request": {}, "requests": []})

    fake.answers |= {("POST", "/v1/requests/1/cancel"): answer, ("GET", "/v1/requests"): answer}
    client.cancel("1")
    with kept.tracer.start_as_current_span("training"):
        await asyncio.to_thread(client.cancel, "1")  # as `AsyncClient` calls it
        client.requests()
    monkeypatch.setenv("TRACEPARENT", COMMANDS)
    client.cancel("1")
    trace_id, span_id, _ = ids_of(kept.one("training"))
    assert heads == ["", f"00-{trace_id}-{span_id}", "", COMMANDS[:52]]


# A request is followed to its end, whatever happens to the stream


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
        following.wait(lambda: None, "1")
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
