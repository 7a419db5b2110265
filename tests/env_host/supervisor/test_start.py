# SPDX-License-Identifier: Apache-2.0
"""Starting: what the host says when it is ready, and when it cannot be."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from openenvd.rollouts.session.session import Session, SessionFailed
from openenvd.schema.protocol import (
    DEFAULT_SESSIONS,
    EXIT_FAILED_TO_START,
    NO_SESSIONS,
    HostConfig,
)

from ..conftest import ECHO, StartHost
from ..hosts import PROGRAM, WAIT_SECONDS, Host
from ..samples import SAMPLES

UPSTREAM = '''
class FastAPI:
    """As much of an ASGI app as the host needs."""
    def __init__(self):
        self.routes = []
    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b'"the project"'})

class Config:
    session_timeout = None

class HTTPEnvServer:
    def __init__(self, env, action_cls, observation_cls, max_concurrent_envs):
        self._env_factory, self._concurrency_config = env, Config()
        self.action_cls, self.observation_cls = action_cls, observation_cls
        self.env_name, self.max = "theirs", max_concurrent_envs
        self._validate_concurrency_safety()
    def _validate_concurrency_safety(self):
        if self.max > 1 and not self._env_factory.SUPPORTS_CONCURRENT_SESSIONS:
            raise RuntimeError("not marked")
    def register_routes(self, app, mode="simulation"):
        pass

def create_app(env, action_cls, observation_cls, max_concurrent_envs=1):
    app = FastAPI()
    HTTPEnvServer(env, action_cls, observation_cls, max_concurrent_envs).register_routes(app)
    return app
'''
APP = """
from openenv.core.env_server.http_server import create_app
from samples import {name}, Do, Seen
app = create_app({name}, Do, Seen, max_concurrent_envs=4)
"""


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A stand-in for upstream's package: what the host touches of it, and nothing more."""
    package = tmp_path / "openenv" / "core" / "env_server"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "http_server.py").write_text(UPSTREAM)
    return tmp_path


def failure(host: Host) -> tuple[str, list[str]]:
    note = host.note()
    assert note is not None
    assert host.process.wait(WAIT_SECONDS) == EXIT_FAILED_TO_START
    return note["failed"], note["log_tail"]


def test_ready_reports_the_maximum_of_sessions(start: StartHost) -> None:
    assert start(ECHO).ready() == {
        "ready": True,
        "max_sessions": DEFAULT_SESSIONS,
        "serving": "sessions",
        "shards": 1,
        "isolate": False,
    }


def test_the_host_starts_without_upstreams_package(start: StartHost) -> None:
    host = start(ECHO)
    host.ready()
    assert host.stop() == 0
    assert host.log.read_text() == ""


def test_several_sessions_in_a_process_of_a_class_for_one_fail_the_start(start: StartHost) -> None:
    message, _ = failure(start("Single", max_sessions=4, isolate=False))
    assert "SUPPORTS_CONCURRENT_SESSIONS" in message


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere:Class", "No module named 'nowhere'"),
        ("samples:Nobody", "has no class Nobody"),
        ("samples:Countr", "has no class Countr; did you mean Counter?"),
        ("samples:NotOne", "no reset and no step"),
        ("a:", "not of the form"),
    ],
)
def test_a_class_that_cannot_be_served_is_named(
    start: StartHost, reference: str, message: str
) -> None:
    assert message in failure(start(reference))[0]


def test_a_missing_module_is_reported_with_the_searched_paths(
    start: StartHost, tmp_path: Path
) -> None:
    message, lines = failure(start("nowhere.at.all:Class"))
    assert message.startswith("No module named 'nowhere.at.all' in ")
    assert str(tmp_path) in message
    assert lines == []


def test_a_complete_message_comes_without_a_traceback(start: StartHost) -> None:
    host = start("samples:Nobody")
    message, lines = failure(host)
    assert lines == []
    assert host.log.read_text().splitlines() == [message]


def test_a_failed_import_is_reported_with_the_end_of_its_traceback(
    start: StartHost, tmp_path: Path
) -> None:
    (tmp_path / "unwell.py").write_text("import a_module_that_nobody_has\n")
    host = start("unwell:Class")
    message, lines = failure(host)
    assert message == "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"
    assert lines[-1] == message
    assert "unwell.py" in lines[1]  # no frame of ours comes before
    assert lines[-1] in host.log.read_text()


@pytest.mark.parametrize(("text", "message"), [("", "is not set"), ("[", "not a configuration")])
def test_an_invalid_configuration_is_refused(start: StartHost, text: str, message: str) -> None:
    host = start(env={"OPENENVD_HOST_CONFIG": text})
    assert message in failure(host)[0]


def test_the_host_imports_no_package_of_ours_but_system() -> None:
    """It finds its own package without putting the folder above on `sys.path`."""
    code = f"""
import runpy, sys
sys.argv = ["host"]
program = runpy.run_path({str(PROGRAM)!r}, run_name="not_main")
sys.modules.pop("openenvd", None)
program["make_package_known"]()
import openenvd.env_host.main, openenvd.env_host.serving.app
root = {str(PROGRAM.parents[1])!r}
assert root not in sys.path, sys.path
heavy = {{"fastapi", "starlette", "sqlalchemy", "httpx", "click.testing"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd="/")


def test_a_projects_class_is_served_and_its_other_routes_kept(
    start: StartHost, upstream: Path
) -> None:
    (upstream / "app.py").write_text(APP.format(name="Counter"))
    host = start(None, app_candidates=("app:app",))
    assert host.ready()["max_sessions"] == DEFAULT_SESSIONS
    assert host.http("GET", "/anything") == (200, "the project")
    with host.open() as client:
        assert client.ask("step", {"what": "count"})["data"]["observation"]["text"] == "1"


def test_upstreams_check_for_concurrency_does_not_fail_a_project(
    start: StartHost, upstream: Path
) -> None:
    (upstream / "app.py").write_text(APP.format(name="Single"))
    host = start(None, app_candidates=("app:app",), isolate=False)
    assert host.ready()["max_sessions"] == 1


def test_a_program_that_starts_its_server_when_it_is_imported_is_served(
    start: StartHost, upstream: Path
) -> None:
    """The module calls `uvicorn.run` without checking `__name__`."""
    text = APP.format(name="Counter") + "\nimport uvicorn\nuvicorn.run(app, port=8000)\n"
    (upstream / "app.py").write_text(text)
    start(None, app_candidates=("app:app",)).ready()


def test_the_second_form_of_import_is_tried(start: StartHost, upstream: Path) -> None:
    (upstream / "app.py").write_text(APP.format(name="Counter"))
    start(None, app_candidates=("package.app:app", "app:app")).ready()


@pytest.mark.parametrize("where", ["__init__.py", "client.py"])
def test_a_package_that_only_trainers_can_import_is_served_without_it(
    start: StartHost, tmp_path: Path, upstream: Path, where: str
) -> None:
    package = upstream / "package"
    (package / "server").mkdir(parents=True)
    (package / "__init__.py").write_text("from .client import Client\n")
    (package / "client.py").write_text("Client = object\n")
    (package / where).write_text("import a_library_of_trainers\n")
    (package / "server" / "__init__.py").write_text("")
    (package / "models.py").write_text("size = 1\n")
    guarded = "try:\n  from ..models import size\nexcept ImportError:\n  from models import size\n"
    own = "class Mine(Counter): pass\napp = create_app(Mine,"  # whose code is read
    app = APP.format(name="Counter").replace("app = create_app(Counter,", own)
    (package / "server" / "app.py").write_text(guarded + app)
    paths = (str(upstream), str(package))
    host = start(
        None, app_candidates=("package.server.app:app", "server.app:app"), import_paths=paths
    )
    host.ready()
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"


def test_the_most_informative_failure_is_reported(start: StartHost, upstream: Path) -> None:
    (upstream / "app.py").write_text("import a_module_that_nobody_has\n")
    message, _ = failure(start(None, app_candidates=("package.app:app", "app:app")))
    assert "a_module_that_nobody_has" in message


ABSENT = {
    "app_candidates": ("package.envs.app:app", "envs.app:app"),
    "app_fallbacks": ("package.app:app", "app:app"),
    "app_place": "/p/openenv.yaml, line 5",
}


@pytest.mark.parametrize("serve_as_is", [False, True])
def test_an_app_that_is_named_wrongly_is_found_where_it_usually_is_and_that_is_said(
    start: StartHost, upstream: Path, serve_as_is: bool
) -> None:
    (upstream / "app.py").write_text(APP.format(name="Counter"))
    host = start(None, serve_as_is=serve_as_is, **ABSENT)
    told = "/p/openenv.yaml, line 5: app: No module named 'envs'; serving app:app instead"
    assert host.ready()["notes"][0] == told
    assert told in host.log.read_text()


def test_an_app_that_nothing_names_is_not_blamed_on_a_file(
    start: StartHost, upstream: Path
) -> None:
    message, _ = failure(start(None, app_candidates=("server.app:app",)))
    told = "no app was found, and none is named: No module named 'server'; tried server.app:app"
    assert message == told


def test_an_app_that_fails_is_not_replaced_by_another(start: StartHost, upstream: Path) -> None:
    (upstream / "special.py").write_text("import a_module_that_nobody_has\n")
    (upstream / "app.py").write_text(APP.format(name="Counter"))
    host = start(None, app_candidates=("special:app",), app_fallbacks=("app:app",))
    assert "a_module_that_nobody_has" in failure(host)[0]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (ABSENT["app_candidates"], "No module named 'envs'; tried package.envs.app:app, envs.app"),
        (("samples:other",), "module 'samples' has no attribute 'other'; tried samples:other"),
    ],
)
def test_a_manifest_that_names_no_app_is_told_by_file_and_line(
    start: StartHost, upstream: Path, names: tuple[str, ...], told: str
) -> None:
    message, lines = failure(start(None, **{**ABSENT, "app_candidates": names}))
    assert message.startswith(f"/p/openenv.yaml, line 5: app: {told}")
    assert lines == []


def test_an_app_that_is_not_upstreams_is_served_as_it_is(start: StartHost, upstream: Path) -> None:
    (upstream / "app.py").write_text(
        "from openenv.core.env_server.http_server import FastAPI\napp = FastAPI()\n"
    )
    host = start(None, app_candidates=("app:app",))
    assert host.ready()["serving"] == "http"
    assert host.http("GET", "/health") == (200, "the project")


FOREIGN = """
from fastapi import FastAPI, WebSocket
from fastapi.staticfiles import StaticFiles
from starlette.middleware.gzip import GZipMiddleware
inner = FastAPI()
app = FastAPI()
@app.post("/reset")
def reset():
    return {"observation": 0}
"""
OWN_MIDDLEWARE = """
class Own(GZipMiddleware):
    async def __call__(self, *call):
        await self.app(*call)
"""
BARE = """
made, started = app, []
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        started.append(await receive())
        await send({"type": "lifespan.startup.complete"})
        return
    if scope["type"] == "websocket":
        assert started
        HANDSHAKE
    await made(scope, receive, send)
"""


def bare(handshake: str) -> str:
    return BARE.replace("HANDSHAKE", handshake)


OWN_SESSIONS = """
@inner.websocket("/ws")
async def ws(socket: WebSocket):
    await socket.accept()
    await socket.send_text("my own")
"""


@pytest.mark.parametrize(
    ("more", "serving"),
    [
        ("", "http"),
        ("app.mount('/static', StaticFiles(directory='.'))", "http"),
        ("app.mount('/', StaticFiles(directory='.'))", "http"),
        ("app.mount('/', inner)", "http"),
        ("app = GZipMiddleware(app)", "http"),
        ("app.websocket('/other')(lambda socket: None)", "http"),
        (OWN_SESSIONS + "app.mount('/', inner)", "as_is"),
        (OWN_SESSIONS + "app.include_router(inner.router)", "as_is"),
        (OWN_SESSIONS + "app = GZipMiddleware(inner)", "as_is"),
        (OWN_MIDDLEWARE + "app = Own(app)", "http"),
        (OWN_MIDDLEWARE + "app.add_middleware(Own)", "http"),
        (OWN_MIDDLEWARE + OWN_SESSIONS + "app = Own(inner)", "as_is"),
        (OWN_MIDDLEWARE + OWN_SESSIONS + "app.mount('/', Own(inner))", "as_is"),
        (bare("pass"), "http"),
        (bare("return"), "http"),
        (bare("raise AssertionError"), "http"),
        (bare("await send({'type': 'http.response.start', 'status': 400})"), "http"),
        (bare("await send({'type': 'websocket.close', 'code': 1008}); return"), "as_is"),
        (bare("await send({'type': 'websocket.accept'}); return"), "as_is"),
    ],
)
def test_an_app_without_sessions_says_so_at_the_handshake(
    start: StartHost, tmp_path: Path, more: str, serving: str
) -> None:
    (tmp_path / "app.py").write_text(FOREIGN + more)
    host = start(None, app_candidates=("app:app",))
    ready = host.ready()
    assert ready["serving"] == serving
    if serving == "as_is":
        return
    assert ready["route"] == (None if "made" in more else "POST /reset")
    assert any(note.startswith(NO_SESSIONS) for note in ready["notes"])
    assert host.http("POST", "/reset", {}) == (200, {"observation": 0})
    for path in ("/health", "/capacity"):
        assert host.http("GET", path)[1]["route"] == ready["route"]
    address = f"http://127.0.0.1:{host.port}"
    with pytest.raises(SessionFailed) as failed:
        asyncio.run(Session.open(address))
    assert str(failed.value) == f"{address}: {NO_SESSIONS}"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def app():\n    raise SystemExit", "of the type function"),
        ("class app:\n    async def __call__(self, scope, receive, send): ...", "a class"),
        ("app = 3", "of the type int"),
        ("class Flask:\n  wsgi_app = 1\n  def __call__(self, environ, start): ...\napp = Flask()",
         "of the type Flask"),
        ("class Group:\n    def __call__(self, *args, **named): ...\napp = Group()",
         "of the type Group"),
    ],
)  # fmt: skip
def test_an_app_that_is_no_asgi_application_is_not_ready(
    start: StartHost, tmp_path: Path, text: str, what: str
) -> None:
    (tmp_path / "app.py").write_text(text)
    message, lines = failure(start(None, app_candidates=("app:app",)))
    assert message.startswith(f"app:app is {what}, and no ASGI application")
    assert ("WSGI" in message) is ("Flask" in text)
    assert lines == []


def test_an_app_may_be_made_by_a_function(start: StartHost, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(FOREIGN + "made = app\ndef create_app():\n    return made\n")
    host = start(None, app_candidates=("app:create_app()",))
    host.ready()
    assert host.http("POST", "/reset", {}) == (200, {"observation": 0})


def test_serve_as_is_does_not_change_the_projects_app(start: StartHost, upstream: Path) -> None:
    (upstream / "app.py").write_text(APP.format(name="Counter"))
    said = {"OpenEnvd-Environment": "counter"}
    host = start(None, app_candidates=("app:app",), serve_as_is=True, headers=said)
    assert host.ready()["serving"] == "http"  # the stand-in has no sessions of its own
    assert host.http("POST", "/mcp", {}) == (200, "the project")
    with urlopen(f"http://127.0.0.1:{host.port}/health", timeout=10.0) as answer:
        assert answer.headers["OpenEnvd-Environment"] == "counter"
    assert host.stop() == 0


UPSTREAM_WITH_GRADIO = """
try:
    from .web_interface import create_web_interface_app, WebInterfaceManager
except ModuleNotFoundError:
    create_web_interface_app = None
    WebInterfaceManager = None
"""
WEB_INTERFACE = """
import gradio
WebInterfaceManager = object
def create_web_interface_app(*args, **named):
    from .http_server import create_app
    return create_app(*args, **named)
"""


@pytest.fixture
def gradio(upstream: Path) -> Path:
    """Upstream's package, as it imports gradio; and what says that it was imported."""
    server = upstream / "openenv" / "core" / "env_server"
    (server / "__init__.py").write_text(UPSTREAM_WITH_GRADIO)
    (server / "web_interface.py").write_text(WEB_INTERFACE)
    (upstream / "gradio.py").write_text("print('gradio was imported')\nBlocks = dict\n")
    return upstream


GUARDED = "try:\n    import gradio\nexcept {}:\n    gradio = None\n"
USUAL = "env_server.http_server import create_app"
OF_GRADIO = "env_server import create_web_interface_app as create_app"


@pytest.mark.parametrize(
    ("head", "is_imported"),
    [
        ("", False),
        ("from openenv.core.env_server import http_server\n", False),
        ("import gradio\n", True),
        (GUARDED.format("ImportError"), True),
        (GUARDED.format("ModuleNotFoundError"), True),
        ("from page import Blocks\n", True),
        ("import openenv.core.env_server.web_interface\n", True),
        (OF_GRADIO, True),
    ],
)
def test_gradio_is_kept_out_of_upstreams_package_and_of_no_code_of_the_project(
    start: StartHost, gradio: Path, head: str, is_imported: bool
) -> None:
    (gradio / "page.py").write_text("from gradio import Blocks\n")
    app = APP.format(name="Counter")
    text = app.replace(USUAL, head) if head == OF_GRADIO else head + app
    (gradio / "app.py").write_text(text)
    host = start(None, app_candidates=("app:app",))
    host.ready()
    assert host.log.read_text().count("gradio was imported") == is_imported
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"


def test_gradio_is_there_when_the_web_interface_is_on(start: StartHost, gradio: Path) -> None:
    (gradio / "app.py").write_text(APP.format(name="Counter"))
    host = start(None, app_candidates=("app:app",), env={"ENABLE_WEB_INTERFACE": "true"})
    host.ready()
    assert "gradio was imported" in host.log.read_text()


CALLED = """
from openenv.core.env_server.http_server import create_app
from samples import Counter, Do, Seen
def make():
    print("the factory was called")
    made = Counter()
    return made
app = create_app(make, Do, Seen)
"""


def test_a_factory_whose_code_does_not_name_its_class_is_called_once_at_each_start(
    start: StartHost, upstream: Path
) -> None:
    (upstream / "app.py").write_text(CALLED)
    for _ in range(2):
        host = start(None, app_candidates=("app:app",))
        assert host.ready()["isolate"] is False
        host.stop()
        assert host.log.read_text().count("the factory was called") == 1


def test_byte_code_is_written_for_what_is_imported_from_the_projects_venv_alone(
    start: StartHost, upstream: Path, tmp_path: Path
) -> None:
    packages = tmp_path / "venvs" / "one" / "packages"
    packages.mkdir(parents=True)
    for name in ("wanted", "unwanted"):
        (packages / f"{name}.py").write_text("")
    (upstream / "app.py").write_text("import wanted\n" + APP.format(name="Counter"))
    start(
        None,
        app_candidates=("app:app",),
        import_paths=(str(upstream), str(packages)),
        venv=str(tmp_path / "venvs" / "one"),
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    ).ready()
    assert [path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")] == ["wanted"]


def test_our_own_byte_code_is_written_for_the_pythons_of_projects(
    upstream: Path, tmp_path: Path
) -> None:
    package = tmp_path / "openenvd"
    for room in ("env_host", "schema", "system"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROGRAM.parents[1] / room, package / room, ignore=ignored)
    shutil.copy(PROGRAM.parents[1] / "__init__.py", package)
    (upstream / "app.py").write_text(APP.format(name="Counter"))
    (upstream / "samples.py").write_text(SAMPLES)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -P {package}/env_host/__main__.py\n")
    python.chmod(0o700)
    config = HostConfig(
        name="mine",
        app_candidates=("app:app",),
        import_paths=(str(upstream),),
        venv=str(tmp_path / "venvs" / "one"),
    )
    host = Host(config, tmp_path, python=str(python), env={"PYTHONDONTWRITEBYTECODE": "1"})
    try:
        host.ready()
    finally:
        host.close()
    written = {path.name.partition(".")[0] for path in package.rglob("*.pyc")}
    assert {"main", "protocol", "supervisor", "shard", "forking"} <= written
    assert not (upstream / "__pycache__").exists()


MCP_ENVIRONMENT = """
from fastmcp import Client
from fastmcp.client.client import Result
from mcp.types import Text
import typing
Known: typing.TypeAlias = typing.Optional[Client]
def use():
    return type(Client("x")).__module__, isinstance(Result(), Result), Text.kind
"""
USING = """
from openenv.core.env_server.mcp_environment import use
class Using(Counter):
    def do_use(self, action):
        return str(use())
app = create_app(Using, Do, Seen)
"""


def test_fastmcp_is_imported_when_upstreams_class_uses_it(start: StartHost, upstream: Path) -> None:
    for name, text in {
        "fastmcp": "print('fastmcp was imported')\nclass Client(str):\n    pass\n",
        "fastmcp.client": "",
        "fastmcp.client.client": "class Result: pass\n",
        "mcp": "",
        "mcp.types": "class Text:\n    kind = 'text'\n",
    }.items():
        package = upstream.joinpath(*name.split("."))
        package.mkdir()
        (package / "__init__.py").write_text(text)
    server = upstream / "openenv" / "core" / "env_server"
    (server / "mcp_environment.py").write_text(MCP_ENVIRONMENT)
    (server / "http_server.py").write_text("from . import mcp_environment\n" + UPSTREAM)
    (upstream / "app.py").write_text(APP.format(name="Counter") + USING)
    host = start(None, app_candidates=("app:app",))
    host.ready()
    assert "fastmcp was imported" not in host.log.read_text()
    with host.open() as client:
        answer = client.ask("step", {"what": "use"})
    assert answer["data"]["observation"]["text"] == "('fastmcp', True, 'text')"
    assert "fastmcp was imported" in host.log.read_text()
