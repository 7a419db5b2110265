# SPDX-License-Identifier: Apache-2.0
"""A project's sessions behave as its installed version of upstream's package does.

The versions themselves are compared by the smoke tests (`test_conformance.py`); here two stand-ins
have what they differ in.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import StartHost
from ..upstream import SERVER, write_upstream

SERIALIZATION = """
from openenvd.env_host.environment.interfaces import Observation

def serialize_observation(observation):
    left_out = {"reward", "done", "metadata"}
    dumped = observation.model_dump(exclude=left_out)
    return {"observation": dumped, "reward": observation.reward, "done": observation.done}
"""
NEWER = {
    "http_server": SERVER.replace(
        "        self._validate",
        "        self._session_websocket_attachments = 1\n        self._validate",
    ),
    "serialization": SERIALIZATION.replace(', "metadata"}', "}").replace(
        "done}", 'done, "metadata": observation.metadata}'
    ),
}
APP = """
from openenv.core.env_server import serialization
from openenv.core.env_server.http_server import create_app
from samples import Counter, Do, Seen

class Noting(Counter):
    def step(self, action, timeout_s=None):
        hidden = {"count": object()} if action.gate else {}
        return Seen(text="stepped", metadata={"hidden": 42, **hidden})

app = create_app(Noting, Do, Seen)
"""


def install(folder: Path, version: str) -> None:
    write_upstream(folder, **(NEWER if version == "0.5.0" else {"serialization": SERIALIZATION}))
    (folder / "app.py").write_text(APP)


@pytest.mark.parametrize(
    ("version", "within", "beside"),
    [("0.3.1", {"text": "stepped"}, {}), ("0.5.0", {"metadata": {"hidden": 42}}, {"hidden": 42})],
)
def test_metadata_is_sent_where_the_installed_version_sends_it(
    serve: StartHost, tmp_path: Path, version: str, within: dict[str, object], beside: object
) -> None:
    install(tmp_path, version)
    with serve(None, app_candidates=("app:app",)).open() as client:
        data = client.ask("step", {})["data"]
        assert data == {
            "observation": {"text": "stepped", **within},
            "reward": None,
            "done": False,
            **({"metadata": beside} if beside else {}),
        }
        answer = client.ask("step", {"gate": "metadata that has no JSON form"})
        assert answer["type"] == ("observation" if version == "0.3.1" else "error")


@pytest.mark.parametrize("isolate", [False, True])
def test_an_older_version_ignores_the_id_of_an_unknown_session(
    serve: StartHost, tmp_path: Path, isolate: bool
) -> None:
    install(tmp_path, "0.3.1")
    host = serve(None, app_candidates=("app:app",), isolate=isolate)
    gone = "00000000-0000-4000-a000-000000000001"
    for wanted in ("nobody", gone):
        with host.open(f"/ws?session_id={wanted}") as client:
            assert client.ask("reset", {"episode_id": "e"})["type"] == "observation"
            assert client.ask("state")["data"]["episode_id"] == "e"
            assert host.http("GET", "/capacity")[1]["sessions"] == 1
        host.emptied()


def test_a_newer_version_refuses_the_id_of_an_unknown_session(
    serve: StartHost, tmp_path: Path
) -> None:
    install(tmp_path, "0.5.0")
    host = serve(None, app_candidates=("app:app",))
    with host.open("/ws?session_id=nobody") as client:
        assert client.receive()["data"]["message"] == "Unknown session_id: nobody"
