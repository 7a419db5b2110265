# SPDX-License-Identifier: Apache-2.0
"""A session's steps before its first reset are refused, unless its environment needs none.

Upstream's clients connect again by themselves, in silence, and would take their next step in
another world; the real one, whose server is killed, is in the smoke tests (`test_upstream.py`,
`providers/test_sessions.py`).
"""

from pathlib import Path
from typing import Any

import pytest

from ..conftest import StartHost
from ..hosts import Client

MODULE = """
import samples

class Undeclared(samples.Counter):
    RESET_FIRST = True  # as of every class that says nothing: `Counter` says no

class Free(samples.Counter):
    RESET_FIRST = False
"""


def first_step(client: Client, **data: Any) -> str:
    """The type or the error's code that a step is answered with."""
    answer = client.ask("step", data)
    return str(answer["data"].get("code", answer["type"]))


@pytest.fixture(autouse=True)
def module(tmp_path: Path) -> None:
    (tmp_path / "resets.py").write_text(MODULE)


def test_a_session_goes_on_after_a_refused_step(serve: StartHost, isolate: bool) -> None:
    with serve("resets:Undeclared", isolate=isolate).open() as client:
        told = client.ask("step", {})["data"]
        assert told["code"] == "SESSION_NOT_RESET"
        assert "Call reset" in told["message"]
        assert "reset_first: false" in told["message"]
        assert client.ask("state")["type"] == "state"
        assert first_step(client) == "SESSION_NOT_RESET"
        assert client.ask("reset", {"episode_id": "next"})["type"] == "observation"
        assert client.ask("step", {})["data"]["observation"]["text"] == "1"


@pytest.mark.parametrize(
    ("name", "manifest", "option", "answer"),
    [
        ("Undeclared", None, None, "SESSION_NOT_RESET"),
        ("Undeclared", False, None, "observation"),
        ("Undeclared", 0, None, "SESSION_NOT_RESET"),
        ("Undeclared", False, True, "SESSION_NOT_RESET"),
        ("Free", None, None, "observation"),
        ("Free", True, None, "SESSION_NOT_RESET"),
        ("Free", True, False, "observation"),
        ("Free", None, True, "SESSION_NOT_RESET"),
    ],
)
def test_the_launch_decides_over_the_manifest_and_that_over_the_class(
    serve: StartHost, name: str, manifest: int | None, option: bool | None, answer: str
) -> None:
    declared = {} if manifest is None else {"reset_first": manifest}
    with serve(f"resets:{name}", reset_first=option, manifest=declared).open() as client:
        assert first_step(client) == answer


def test_a_class_that_says_nothing_needs_a_reset(serve: StartHost) -> None:
    text = "class Bare:\n    def reset(self): return {}\n    def step(self, action): return {}\n"
    with serve("bare:Bare", files={"bare.py": text}).open() as client:
        assert first_step(client) == "SESSION_NOT_RESET"


def test_tools_are_listed_and_called_over_mcp_without_a_reset(serve: StartHost) -> None:
    """Upstream says so of both; a step that calls a tool is a step as any other."""
    with serve("resets:Undeclared").open() as client:
        assert first_step(client, type="list_tools") == "VALIDATION_ERROR"  # none here, but asked
        for method in ("tools/list", "tools/call"):
            call = {"jsonrpc": "2.0", "method": method, "params": {"name": "x"}, "id": 1}
            assert client.ask("mcp", call)["type"] == "mcp"
        assert first_step(client, type="call_tool") == "SESSION_NOT_RESET"


def test_what_is_begun_over_http_may_begin_with_a_step(serve: StartHost) -> None:
    host = serve("resets:Undeclared")
    assert host.http("POST", "/step", {"action": {}})[0] == 200
    with host.open(f"/ws?session_id={host.create_session()}") as client:
        assert first_step(client) == "observation"
