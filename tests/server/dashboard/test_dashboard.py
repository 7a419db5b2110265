# SPDX-License-Identifier: Apache-2.0
"""The dashboard over the daemon's real TCP port, as a browser calls it."""

import asyncio
import contextlib
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from openenvd.client import daemon
from openenvd.client.api import DaemonClient
from openenvd.client.following import wait
from openenvd.client.http import parse_events
from openenvd.schema.settings import Paths
from openenvd.server.api.routes_environments import log_to_show
from openenvd.server.dashboard.live_state import MAX_BEHIND_BYTES, FollowedLog
from openenvd.server.dashboard.routes import FOLDER as STATIC
from openenvd.server.dashboard.routes import MAX_PLAYERS, SECURITY_HEADERS

from ..conftest import WAIT_SECONDS

Json = dict[str, Any]
MAX_BYTES = 90_000
LATER = {"charts.js", "log.js", "replay.js", "schema_form.js"} | {
    "panels/environment.js",
    "panels/launch.js",
    "panels/play.js",
    "panels/request.js",
    "panels/rollouts.js",
}
IDENTITY = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    return Paths(tmp_path_factory.mktemp("dashboard") / "home")


@pytest.fixture(scope="module")
def client(paths: Paths) -> Iterator[DaemonClient]:
    client = daemon.connect(paths, settings={"port": 0})
    yield client
    daemon.stop(paths)


class Browser:
    """What a browser sends from a page of the daemon, or another."""

    def __init__(self, client: DaemonClient) -> None:
        self.port = client.identity["port"]
        self.origin = f"http://127.0.0.1:{self.port}"
        self.signed_in: dict[str, str] = {}

    def call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        with contextlib.closing(connection):
            sent = {**IDENTITY, "Origin": self.origin, **self.signed_in}
            sent |= headers or {}
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {k: v for k, v in sent.items() if v})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def sign_in(self, client: DaemonClient) -> None:
        code = client.dashboard_link()["url"].partition("#")[2]
        status, headers, answer = self.call("POST", "/dashboard/session", {"code": code})
        assert status == 200, answer
        cookie = str(headers["Set-Cookie"]).partition(";")[0]
        self.signed_in = {"Cookie": cookie, "X-Openenvd-Key": json.loads(answer)["key"]}

    @contextlib.contextmanager
    def stream(self, query: str = "") -> Iterator[Iterator[tuple[str, Json]]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", f"/v1/dashboard/stream{query}", headers=self.signed_in)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            lines = iter(answer.readline, b"")
            yield ((event.name, event.data) for event in parse_events(lines))


@pytest.fixture
def stranger(client: DaemonClient) -> Browser:
    return Browser(client)


@pytest.fixture
def browser(client: DaemonClient) -> Browser:
    browser = Browser(client)
    browser.sign_in(client)
    return browser


# Playing by hand.


def test_a_few_pages_play_at_once_and_a_session_ends_with_its_page(
    browser: Browser, client: DaemonClient
) -> None:
    wait(lambda: client, client.submit("launch", {"source": "echo", "name": "played"})["id"])

    def call(page: int, kind: str, data: Json) -> tuple[int, Json]:
        body = {"call": kind, "data": data}
        status, _, answer = browser.call("POST", f"/v1/dashboard/play/{page:032x}", body)
        return status, json.loads(answer)

    assert call(1, "reset", {})[1]["error"]["message"].startswith("this play has ended")
    assert call(1, "begin", {"environment": "nonesuch"})[0] == 404
    for page in range(MAX_PLAYERS):
        status, found = call(page, "begin", {"environment": "played"})
        assert (status, found["required"]) == (200, ["message"])
    status, refused = call(99, "begin", {"environment": "played"})
    assert (status, refused["error"]["message"]) == (429, "8 pages play already")
    assert call(0, "save", {"path": "x"})[1]["error"]["message"].startswith("nothing was played")
    assert call(0, "reset", {"seed": 1})[1]["done"] is False
    assert call(0, "step", {"message": "hi"})[1]["observation"]["value"]["echoed_message"] == "hi"
    assert call(0, "step", {"message": 1})[1]["error"]["field"] == "message"
    for page in range(MAX_PLAYERS):
        assert browser.call("DELETE", f"/v1/dashboard/play/{page:032x}")[0] == 204
    assert call(0, "step", {"message": "hi"})[0] == 404
    assert call(99, "begin", {"environment": "played"})[0] == 200
    browser.call("DELETE", f"/v1/dashboard/play/{99:032x}")
    wait(lambda: client, client.submit("down", {"name": "played"})["id"])


# Signing in.


def test_a_link_signs_in_once_with_a_code_that_no_server_is_sent(
    client: DaemonClient, stranger: Browser, paths: Paths
) -> None:
    begin, _, code = client.dashboard_link()["url"].partition("#")
    assert begin == f"{client.address}/"
    paths.sign_in_page.write_text(code)
    assert stranger.call("POST", "/dashboard/session", {"code": code})[0] == 200
    assert not paths.sign_in_page.exists()
    status, headers, answer = stranger.call("POST", "/dashboard/session", {"code": code})
    assert status == 401
    assert "Set-Cookie" not in headers
    assert json.loads(answer)["error"]["hint"].startswith("openenv dashboard")


@pytest.mark.parametrize("origin", ["", "http://127.0.0.1:3000", "http://localhost:3000", "null"])
def test_no_other_page_signs_in(client: DaemonClient, stranger: Browser, origin: str) -> None:
    code = client.dashboard_link()["url"].partition("#")[2]
    status, _, _ = stranger.call("POST", "/dashboard/session", {"code": code}, {"Origin": origin})
    assert status == 403
    assert stranger.call("POST", "/dashboard/session", {"code": code})[0] == 200  # still unused


@pytest.mark.parametrize("name", ["Cookie", "X-Openenvd-Key"])
def test_cookie_and_key_are_enough_to_call_the_api_and_neither_alone_is(
    browser: Browser, name: str
) -> None:
    assert browser.call("GET", "/v1/status", headers={"Origin": ""})[0] == 200
    assert browser.call("POST", "/v1/requests/0123456789abcdef/cancel")[0] == 404
    assert browser.call("GET", "/v1/status", headers={name: ""})[0] == 401
    assert browser.call("POST", "/v1/requests/0/cancel", headers={name: ""})[0] == 401


ORIGINS = ["", "http://127.0.0.1:1", "http://localhost:3000", "null"]
REBOUND = {"Host": "evil.example", "Origin": "http://evil.example"}


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        *(("POST", "/v1/requests/0/cancel", {"Origin": origin}) for origin in ORIGINS),
        ("GET", "/v1/status", {"Origin": "http://localhost:3000"}),
        ("GET", "/v1/status", {"Origin": "", "Sec-Fetch-Site": "same-site"}),
        ("GET", "/", REBOUND),
        ("GET", "/v1/status", REBOUND),
        ("POST", "/v1/requests/0/cancel", REBOUND),
        ("POST", "/dashboard/session", REBOUND),
    ],
)
def test_a_page_of_another_port_or_of_a_rebound_name_does_nothing_with_cookie_and_key(
    browser: Browser, method: str, path: str, headers: dict[str, str]
) -> None:
    body = {"code": "x"} if path == "/dashboard/session" else None
    status, _, answer = browser.call(method, path, body, headers)
    assert status == 403, answer


# The page and its files.


def test_every_file_comes_with_the_security_headers(stranger: Browser) -> None:
    names = [str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file()]
    assert "app.js" in names
    for path in ["/", *(f"/dashboard/{name}" for name in names)]:
        status, headers, _ = stranger.call("GET", path, headers={"Origin": ""})
        assert status == 200, path
        for name, value in SECURITY_HEADERS.items():
            assert headers[name] == value, (path, name)


def test_the_page_is_small_with_all_modules_and_nothing_inline_or_foreign() -> None:
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", html)
    for path in STATIC.rglob("*.*"):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        found = re.findall(r"(?:src|href|import|from|url\()\W{0,3}https?://", text)
        assert not found, path
        assert "innerHTML" not in text, path
        assert not re.search(r"\.toLocale\w+\(|Intl\.", text), f"{path} is slow at first"
    # Else the browser finds each only after the one that imports it. Pages shown later load theirs.
    loaded = set(re.findall(r'(?:href|src)="/dashboard/([^"]+\.js)"', html))
    known = {str(path.relative_to(STATIC)) for path in STATIC.rglob("*.js")}
    assert loaded == known - LATER
    first = [*STATIC.glob("*.html"), STATIC / "style.css", *(STATIC / name for name in loaded)]
    assert sum(path.stat().st_size for path in first) < MAX_BYTES, "the first screen is large"


@pytest.mark.parametrize("path", ["/", "/dashboard/app.js"])
def test_a_browser_asks_each_time_and_a_file_that_it_has_is_not_sent_again(
    stranger: Browser, path: str
) -> None:
    _, headers, content = stranger.call("GET", path, headers={"Origin": ""})
    assert (headers["Cache-Control"], bool(content)) == ("no-cache", True)
    known = {"Origin": "", "If-None-Match": str(headers["ETag"])}
    status, _, content = stranger.call("GET", path, headers=known)
    assert (status, content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/dashboard/../routes.py", "/dashboard/%2e%2e/routes.py", "/dashboard//etc/passwd",
     "/dashboard/panels", "/dashboard/__init__.py", "/dashboard/"],
)  # fmt: skip
def test_no_other_file_is_given_out(stranger: Browser, path: str) -> None:
    assert stranger.call("GET", path, headers={"Origin": ""})[0] == 404


# The stream.


def until(events: Iterator[tuple[str, Json]], kind: str, check: Any) -> Json:
    for _, data in events:
        for entity in data["put"].get(kind, {}).values():
            if check(entity):
                found: Json = entity
                return found
    raise AssertionError(f"the stream has ended before {kind} was as expected")


def test_the_stream_begins_with_everything(browser: Browser, client: DaemonClient) -> None:
    done = wait(lambda: client, client.submit("check", {})["id"])
    with browser.stream() as events:
        name, data = next(events)
    put = data["put"]
    assert name == "snapshot"
    assert put["daemon"][""]["address"] == client.address
    assert put["plan"][""]["guaranteed_long"] >= 1
    assert all(
        {"cap_bytes", "rss_bytes", "task_id"} <= each.keys() for each in put["workers"].values()
    )
    assert done["state"] == "SUCCEEDED"


@pytest.mark.parametrize("kind", ["memory", "samples"])
def test_the_memory_is_on_the_stream_when_it_was_measured(browser: Browser, kind: str) -> None:
    with browser.stream() as events:
        measured = until(events, kind, bool)
    if kind == "memory":
        assert measured["daemon"] > 0
        assert measured["free"] + measured["other"] + measured["daemon"] <= measured["limit"]


STUCK = "import time\ntime.sleep(3600)\n"


def launch_of(client: DaemonClient, folder: Path, code: str) -> Json:
    """A launch of a class that is never ready, since its module does this."""
    (folder / "never_env.py").write_text(code)
    return client.submit("launch", {"source": "never_env:Never", "cwd": str(folder)})


def test_the_log_that_a_page_shows_is_on_its_one_stream(
    browser: Browser, client: DaemonClient, tmp_path: Path
) -> None:
    launch = launch_of(client, tmp_path, "exit(3)\n")
    with browser.stream(f"?log=requests/{launch['id']}") as events:
        logs = (data for name, data in events if name == "log")
        assert next(logs) == {"text": "", "is_first": True, "place": f"{launch['id']}.log:0"}
        seen = ""
        while "1 replica starting" not in seen:
            seen += next(logs)["text"]
    wait(lambda: client, launch["id"])
    with browser.stream(f"?log=requests/{launch['id']}&place={launch['id']}.log:1") as events:
        data = next(data for name, data in events if name == "log")
    assert not data["is_first"]
    assert seen[1:] in data["text"]
    with browser.stream(f"?log=requests/{launch['id']}") as events:
        texts = [data["text"] for _, data in (next(events) for _ in range(3)) if "text" in data]
    assert seen in "".join(texts)


def text_of(log: FollowedLog) -> str:
    return "".join(json.loads(each.raw_data or "")["text"] for each in log.messages())


async def test_the_unended_line_is_last_and_who_is_behind_gets_the_newest(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("whole\ncut")
    end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    log = FollowedLog(end)
    await log.show(tmp_path / "log", 200)
    assert text_of(log) == "whole\n"
    end.set_result(None)
    assert text_of(log) == "cut"
    line = "x" * 999 + "\n"
    (tmp_path / "log").write_text(line * (MAX_BEHIND_BYTES // 1000 + 5))
    log = FollowedLog(asyncio.get_running_loop().create_future(), "log:0")
    await log.show(tmp_path / "log", 100_000)
    first, *rest = [json.loads(each.raw_data or "") for each in log.messages()]
    assert (first["is_first"], first["text"]) == (True, "")
    assert "".join(each["text"] for each in rest) == line * (MAX_BEHIND_BYTES // 1000 - 1)


@pytest.mark.parametrize(
    ("place", "is_first", "expected"),
    [
        ("", True, "two\nthree\n"),
        ("log:8", False, "three\n"),
        ("log:0", True, "two\nthree\n"),  # more than is shown has come since
        ("other:8", True, "two\nthree\n"),
    ],
)
async def test_who_comes_back_is_told_the_lines_since(
    tmp_path: Path, place: str, is_first: bool, expected: str
) -> None:
    (tmp_path / "log").write_text("one\ntwo\nthree\n")
    log = FollowedLog(asyncio.get_running_loop().create_future(), place)
    await log.show(tmp_path / "log", 2)
    [*_, last] = messages = [json.loads(each.raw_data or "") for each in log.messages()]
    assert messages[0]["is_first"] == is_first
    assert last == {"text": expected, "is_first": False, "place": "log:14"}


A, B, C = (Path(f"echo-{ordinal}-launch.log") for ordinal in range(3))  # the oldest first


@pytest.mark.parametrize(
    ("logs", "living", "shown", "chosen"),
    [
        ([], {A.stem}, "", None),
        ([A, B], {A.stem, B.stem}, "", B),
        ([A, B], {A.stem, B.stem}, A.name, A),  # it stays, whichever was written to last
        ([A, B, C], {B.stem}, A.name, B),  # its replica was replaced
        ([A, B], set(), A.name, A),
    ],
)
def test_the_log_shown_is_that_of_one_replica_until_it_is_no_more(
    logs: list[Path], living: set[str], shown: str, chosen: Path | None
) -> None:
    assert log_to_show(logs, living, shown) == chosen


def test_the_log_of_an_environment_is_shown_from_its_first_line_and_after_a_restart(
    browser: Browser, client: DaemonClient
) -> None:
    with browser.stream("?log=environments/heard") as events:
        logs = (data for name, data in events if name == "log")
        assert next(logs)["place"] == ""
        wait(lambda: client, client.submit("launch", {"source": "echo", "name": "heard"})["id"])
        began = next(data for data in logs if data["is_first"])
        wait(lambda: client, client.submit("restart", {"name": "heard"})["id"])
        again = next(data for data in logs if data["is_first"])
    assert began["place"].endswith(".log:0")
    assert again["place"].partition(":")[0] != began["place"].partition(":")[0]
    wait(lambda: client, client.submit("down", {"name": "heard"})["id"])


def test_what_a_request_does_is_seen_by_who_comes_later_and_is_not_submitted_again_meanwhile(
    browser: Browser, client: DaemonClient, tmp_path: Path
) -> None:
    launch = launch_of(client, tmp_path, STUCK)

    def is_starting(request: Json) -> bool:
        told = (request.get("progress") or {}).get("message") or ""
        return bool(request["id"] == launch["id"] and "start" in told)

    for _ in range(2):
        with browser.stream() as events:
            until(events, "requests", is_starting)
    assert browser.call("POST", f"/v1/requests/{launch['id']}/retry", {})[0] == 422
    client.cancel(launch["id"])
    assert wait(lambda: client, launch["id"])["state"] == "CANCELLED"


def test_a_launch_again_with_more_memory_keeps_all_else(client: DaemonClient) -> None:
    told = {"source": "echo", "name": "hog", "memory_mb": 300, "session_memory_mb": 100}
    more = {"max_sessions": 7, "env": {"FOO": "bar"}, "token": "auto", "cwd": "/tmp"}
    first = wait(lambda: client, client.submit("launch", {**told, **more})["id"])
    [before] = client.environment("hog")["generations"]
    limits = {"memory_mb": 400, "session_memory_mb": 200}
    again = wait(lambda: client, client.retry(first["id"], **limits)["id"])
    assert again["state"] == "SUCCEEDED", again["error"]
    update = {"update": True, "replaces": again["payload"]["replaces"]}
    assert again["payload"] == {**first["payload"], **limits, **update}
    after = client.environment("hog")["generations"][0]
    assert (before["number"], after["number"]) == (1, 2)
    assert after["spec"] == {**before["spec"], **limits}
    wait(lambda: client, client.submit("down", {"name": "hog"})["id"])
    first = wait(lambda: client, client.submit("launch", {"source": "echo", "name": "wide"})["id"])
    scaled = client.submit("scale", {"name": "wide", "replicas": 2})
    assert wait(lambda: client, scaled["id"])["state"] == "SUCCEEDED"
    again = wait(lambda: client, client.retry(first["id"], memory_mb=300)["id"])
    assert again["state"] == "SUCCEEDED", again["error"]
    assert again["payload"]["replicas"] == 2
    wait(lambda: client, client.submit("down", {"name": "wide"})["id"])


def test_an_ended_request_is_submitted_again_as_it_was(
    browser: Browser, client: DaemonClient
) -> None:
    secret = {"source": "json:Source", "name": "again", "env": {"API_KEY": "sesame"}}
    first = wait(lambda: client, client.submit("launch", secret)["id"])
    status, _, answer = browser.call("POST", f"/v1/requests/{first['id']}/retry", {"memory_mb": 64})
    assert status == 202, answer
    again = json.loads(answer)["request"]
    assert again["id"] != first["id"]
    assert again["payload"]["memory_mb"] == 64
    assert again["payload"]["env"] == first["payload"]["env"]
    assert b"sesame" not in answer
