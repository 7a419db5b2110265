# SPDX-License-Identifier: Apache-2.0
"""`OpenEnvdProvider` as upstream's client calls it."""

from pathlib import Path
from typing import Any

import pytest

from openenvd.client.errors import RequestFailed
from openenvd.client.upstream import OpenEnvdProvider
from openenvd.system.net.access import with_token

from .fake_daemon import Call, FakeDaemon, new_environment, new_request


@pytest.fixture
def launches(fake: FakeDaemon) -> list[dict[str, Any]]:
    """A daemon where every launch and every down succeeds; the bodies that were sent."""
    bodies: list[dict[str, Any]] = []

    def submit(call: Call) -> None:
        assert call.body is not None
        bodies.append(call.body)
        name = call.body["payload"]["name"]
        environment = new_environment(name)
        request = new_request(str(len(bodies)), result={"environment": environment})
        fake.ends(request)
        fake.get(f"/v1/environments/{name}", {"environment": environment})
        token = call.body["payload"].get("token")
        base_url = with_token(environment["address"], token)
        fake.get(f"/v1/environments/{name}/base_url", {"base_url": base_url})
        call.json(202, {"request_id": request["id"], "request": request})

    fake.post("/v1/requests", submit)
    return bodies


def test_start_launches_and_stop_takes_down_once(launches: list[dict[str, Any]]) -> None:
    provider = OpenEnvdProvider("echo", max_sessions=4)
    assert provider.start(env_vars={"A": "1"}) == "http://127.0.0.1:21000"
    provider.wait_for_ready(timeout_s=1.0)
    provider.stop()
    provider.stop()
    OpenEnvdProvider("echo").start()
    launch, down, another = launches
    assert (launch["operation"], down["operation"]) == ("launch", "down")
    payload = launch["payload"]
    assert (payload["source"], payload["max_sessions"], payload["env"]) == ("echo", 4, {"A": "1"})
    assert down["payload"]["name"] == payload["name"] != another["payload"]["name"]


def test_a_client_is_given_the_token_and_a_folder_sent_as_an_absolute_path(
    launches: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OpenEnvdProvider("echo", token="a-token-of-the-tests") as provider:
        assert provider.base_url == "http://127.0.0.1:21000?token=a-token-of-the-tests"
    assert launches[0]["payload"]["token"] == "a-token-of-the-tests"
    monkeypatch.chdir(tmp_path)
    with OpenEnvdProvider(Path("sub") / "my_env") as provider:
        assert (provider.name or "").startswith("my_env-")
    assert launches[2]["payload"]["source"] == str(tmp_path / "sub" / "my_env")


def test_the_container_interface_is_the_same_environment(launches: list[dict[str, Any]]) -> None:
    provider = OpenEnvdProvider("echo")
    address = provider.start_container("registry.example/echo:latest", port=21007)
    provider.wait_for_ready(address, 5.0)
    provider.stop_container()
    assert launches[0]["payload"]["source"] == "echo"
    assert launches[0]["payload"]["port"] == 21007


@pytest.mark.parametrize(("name", "posts"), [("mine", 1), (None, 2)])
def test_a_launch_that_fails_raises_its_message_and_leaves_no_name_that_nobody_knows(
    fake: FakeDaemon, name: str | None, posts: int
) -> None:
    error = {"kind": "operation_error", "message": "cannot import my_env", "hint": None}
    failed = new_request("1", state="FAILED", error=error)
    fake.post("/v1/requests", (202, {"request_id": "1", "request": failed}))
    fake.ends(failed)
    provider = OpenEnvdProvider("./my_env", name=name)
    with pytest.raises(RequestFailed, match="cannot import my_env"):
        provider.start()
    provider.stop()  # nothing is left to take down
    assert len([call for call in fake.calls if call[0] == "POST"]) == posts


def test_a_provider_that_was_not_started_is_an_error(fake: FakeDaemon) -> None:
    provider = OpenEnvdProvider()
    with pytest.raises(RuntimeError, match="not been started"):
        provider.wait_for_ready()
    with pytest.raises(RuntimeError, match="not been started"):
        _ = provider.base_url
    with pytest.raises(RuntimeError, match="source"):
        provider.start()
    assert fake.calls == []
