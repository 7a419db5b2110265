# SPDX-License-Identifier: Apache-2.0
"""What is answered without FastAPI is what FastAPI would have answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from openenvd.client import daemon
from openenvd.server.settings import Paths

CHECK = {"operation": "check", "payload": {}}


@pytest.fixture(scope="module")
def http_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Speaks to a daemon as it is, without a client of ours between."""
    paths = Paths(tmp_path_factory.mktemp("daemon") / "home")
    daemon.connect(paths, settings={"port": 0})
    transport = httpx.HTTPTransport(uds=str(paths.socket))
    headers = {"Authorization": f"Bearer {paths.token.read_text().strip()}"}
    with httpx.Client(
        transport=transport, base_url="http://localhost", headers=headers, timeout=60
    ) as client:
        yield client
    daemon.stop(paths)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"operation": "no such", "payload": {}}',
        b'{"operation": "check", "payload": {"wrong": 1}}',
        b'{"operation": "probe", "payload": {"name": ""}}',
        b'{"operation": "down", "payload": {"name": "nobody"}}',
        b'{"operation": "check", "payload": {}, "priority": "high"}',
    ],
)
def test_a_wrong_call_is_refused_by_the_documented_route(
    http_client: httpx.Client, body: bytes
) -> None:
    hot = http_client.post("/v1/requests", content=body, headers=_type("application/json"))
    # With a parameter the type is not the plain one, and FastAPI answers.
    told = http_client.post(
        "/v1/requests", content=body, headers=_type("application/json; charset=utf-8")
    )
    assert 400 <= hot.status_code < 500
    assert (hot.status_code, hot.json()) == (told.status_code, told.json())


def test_both_ways_answer_alike(http_client: httpx.Client) -> None:
    hot = http_client.post("/v1/requests", json=CHECK)
    cold = http_client.post("/v1/requests?x=1", json=CHECK, headers=_type("application/json; x=y"))
    assert hot.status_code == cold.status_code == 202
    assert _shape(hot.json()) == _shape(cold.json())
    request_id = hot.json()["request_id"]
    ended = http_client.get(f"/v1/requests/{request_id}", params={"wait_seconds": 30})
    assert ended.json()["request"]["state"] == "SUCCEEDED"
    assert ended.json() == http_client.get(f"/v1/requests/{request_id}").json()
    assert ended.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/requests/0123456789abcdef?wait_seconds=5", 404),
        ("/v1/requests/0123456789abcdef?wait_seconds=61", 422),
        ("/v1/requests/0123456789abcdef?wait_seconds=-1", 422),
        ("/v1/requests/0123456789abcdef?wait_seconds=soon", 422),
    ],
)
def test_a_wait_for_an_unknown_request_is_refused(
    http_client: httpx.Client, path: str, status: int
) -> None:
    assert http_client.get(path).status_code == status


def _type(content_type: str) -> dict[str, str]:
    return {"Content-Type": content_type}


def _shape(answer: dict[str, Any]) -> list[str]:
    return sorted([*answer, *answer["request"]])
