# SPDX-License-Identifier: Apache-2.0
"""An environment that cannot be created: the host says why, until one can."""

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed

from openenvd.schema.protocol import TRIAL_VARIABLE

from ..conftest import StartHost
from ..hosts import Host
from ..upstream import write_upstream

PROJECT = """
from pathlib import Path
from openenv.core.env_server.http_server import create_app
from samples import Counter, Do, Seen

def create():
    if not Path("licence").exists():
        raise ModuleNotFoundError("No module named 'textarena'\\nsecond line")
    return Counter()

app = create_app(create, Do, Seen)
"""
CLASS = """
class create(Counter):
    def __init__(self):
        super().__init__()
        if not Path("licence").exists():
            raise ModuleNotFoundError("No module named 'textarena'")

app = create_app(create, Do, Seen)
"""
HANGING = """
from openenvd.env_host.environment import plan
from openenvd.env_host.sessions import table
import time

plan.TRIAL_SECONDS = table.SLOW_SECONDS = 0.1

class create(Counter):
    def __init__(self):
        while not Path("licence").exists():
            time.sleep(0.01)
        super().__init__()
        if Path("void").exists():
            raise OSError("no licence")

app = create_app(create, Do, Seen)
"""
HTTP = """
from fastapi import FastAPI
from openenv.core.env_server.http_server import HTTPEnvServer

app = FastAPI()
server = HTTPEnvServer(create, Do, Seen)

@app.post("/reset")  # as upstream's
async def reset():
    server._env_factory().close()
    return {}

server.register_routes(app)
"""
SHARED = """
from samples import Broken

class Song:
    def read(self):
        return ""

class World(Broken):
    SHARED_STATE = True
    create_state = Song
"""
CAUSE = "ModuleNotFoundError: No module named 'textarena'"


def try_session(host: Host) -> str:
    """The type of the first answer; one that cannot begin is answered without being asked."""
    with host.open() as client:
        with suppress(ConnectionClosed):
            client.send("reset")
        kind: str = client.receive()["type"]
        return kind


def cause(host: Host) -> Any:
    return host.note_that_has("sessions_fail")


def test_a_factory_that_fails_is_told_before_ready_and_until_a_session_succeeds(
    start: StartHost, tmp_path: Path, isolate: bool
) -> None:
    host = start(app=PROJECT, isolate=isolate, max_sessions=None)
    place = f" ({tmp_path / 'app.py'}:8, in create)"
    assert cause(host) == CAUSE + place
    host.ready()
    (tmp_path / "licence").touch()
    assert try_session(host) == "observation"
    assert cause(host) is None
    (tmp_path / "licence").unlink()
    assert try_session(host) == "error"
    assert cause(host) == CAUSE + place


def test_a_class_that_is_not_tried_is_told_with_its_first_session(start: StartHost) -> None:
    host = start(app=PROJECT.partition("def create")[0] + CLASS)
    assert "sessions_fail" not in host.ready()
    assert try_session(host) == "error"
    assert cause(host).startswith(CAUSE)
    host = start("shared:World", files={"shared.py": SHARED}, env={TRIAL_VARIABLE: "1"})
    assert "ready" in (host.note() or {})


def test_a_class_that_fails_is_told_before_ready_when_a_launch_starts_it(
    start: StartHost, isolate: bool
) -> None:
    host = start("Broken", isolate=isolate, max_sessions=None, env={TRIAL_VARIABLE: "1"})
    assert cause(host).startswith("OSError: no licence (")
    host.ready()


def test_a_launch_waits_for_a_slow_constructor(start: StartHost, tmp_path: Path) -> None:
    """A constructor that hangs was called ready; one that failed late, too."""
    (tmp_path / "void").touch()
    app = PROJECT.partition("def create")[0] + HANGING
    host = start(app=app, env={TRIAL_VARIABLE: "1"})
    threading.Timer(1.0, (tmp_path / "licence").touch).start()
    assert cause(host) == f"OSError: no licence ({tmp_path / 'app.py'}:19, in __init__)"
    host.ready()


def test_a_constructor_that_does_not_return_is_told_until_one_does(
    start: StartHost, tmp_path: Path
) -> None:
    host = start(app=PROJECT.partition("def create")[0] + HANGING, shards=1)
    host.ready()
    with host.open() as client:
        client.send("reset")
        host.until(lambda capacity: capacity["sessions"] == 1)
        time.sleep(0.3)  # longer than the constructor may take
    place = f"{tmp_path / 'app.py'}:16, in __init__"
    assert cause(host) == f"the constructor has not returned for 0 s ({place})"
    host.until(lambda capacity: capacity["shards"][0]["abandoned"] == 1)
    (tmp_path / "licence").touch()
    assert try_session(host) == "observation"
    assert cause(host) is None


def test_a_request_without_a_session_reports_whether_an_environment_was_created(
    start: StartHost, tmp_path: Path, isolate: bool
) -> None:
    write_upstream(tmp_path)
    project, _, _ = PROJECT.partition("app =")
    folder, link = tmp_path / "project", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    (folder / "app.py").write_text(project + HTTP)
    (licence := tmp_path / "licence").touch()
    host = start(
        None,
        app_candidates=("app:app",),
        import_paths=(str(link), str(tmp_path)),
        isolate=isolate,
        max_sessions=None,
    )
    host.ready()
    licence.unlink()
    assert host.http("POST", "/reset", {})[0] == 500
    assert cause(host) == f"{CAUSE} ({folder / 'app.py'}:8, in create)"
    licence.touch()
    assert host.http("POST", "/reset", {})[0] == 200
    assert cause(host) is None
