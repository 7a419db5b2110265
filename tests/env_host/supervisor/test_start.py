# SPDX-License-Identifier: Apache-2.0
"""Starting: what the host says when it is ready, and when it cannot be."""

import asyncio
import re
import shutil
import subprocess
import sys
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from openenvd import client
from openenvd.env_host.environment.upstream_project import example_route
from openenvd.rollouts.session.session import Session, SessionFailed
from openenvd.schema.protocol import DEFAULT_SESSIONS, EXIT_FAILED_TO_START, NO_SESSIONS, HostConfig

from ..conftest import ECHO, StartHost
from ..hosts import PROGRAM, WAIT_SECONDS, Host, serving
from ..samples import SAMPLES
from ..upstream import SERVER, write_upstream

pytestmark = pytest.mark.usefixtures("programs")
APP = """
from openenv.core.env_server.http_server import create_app
from samples import {name}, Do, Seen
app = create_app({name}, Do, Seen, max_concurrent_envs=4)

@app.get("/anything")
def anything():
    return "the project"
"""


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """The folder of a project, where the stand-in for upstream's package is."""
    write_upstream(tmp_path)
    return tmp_path


def failure(host: Host) -> tuple[str, list[str]]:
    note = host.note()
    assert note is not None
    assert host.process.wait(WAIT_SECONDS) == EXIT_FAILED_TO_START
    return note["failed"], note["log_tail"]


def test_a_host_without_upstreams_package_is_ready_and_says_what_it_serves(
    start: StartHost,
) -> None:
    host = start(ECHO)
    assert host.ready() == {
        "ready": True,
        "max_sessions": DEFAULT_SESSIONS,
        "serving": "sessions",
        "shards": 1,
        "isolate": False,
    }
    assert host.stop() == 0
    host.note_that(stopped_by=15)
    assert host.log.read_text() == ""


@pytest.mark.parametrize(
    ("reference", "config", "message"),
    [
        ("nowhere.at.all:Class", {}, "No module named 'nowhere.at.all' in "),
        ("samples:Nobody", {}, "has no class Nobody; its environments: Counter, "),
        ("samples:Countr", {}, "has no class Countr; did you mean Counter?"),
        ("samples:NotOne", {}, "no reset and no step"),
        ("a:", {}, "not of the form"),
        ("Single", {"max_sessions": 4, "isolate": False}, "SUPPORTS_CONCURRENT_SESSIONS"),
    ],
)
def test_a_class_that_cannot_be_served_is_named_without_a_traceback(
    start: StartHost, tmp_path: Path, reference: str, config: dict[str, Any], message: str
) -> None:
    host = start(reference, **config)
    told, lines = failure(host)
    assert message in told
    assert str(tmp_path) in told or "nowhere" not in told  # where it was looked for
    assert lines == []
    assert told in host.log.read_text()
    assert "Traceback" not in host.log.read_text()


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


def test_a_syntax_error_is_reported_as_python_does_without_frames(
    start: StartHost, tmp_path: Path
) -> None:
    (tmp_path / "unwell.py").write_text("first = 1\nsecond = (\n")
    _, lines = failure(start("unwell:Class"))
    assert [line.strip() for line in lines] == [
        f'File "{tmp_path / "unwell.py"}", line 2',
        "second = (",
        "^",
        "SyntaxError: '(' was never closed",
    ]


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


@pytest.mark.parametrize(
    ("name", "more", "config"),
    [
        ("Counter", "", {}),
        ("Counter", "", {"app_candidates": ("package.app:app", "app:app")}),
        ("Counter", "import uvicorn\nuvicorn.run(app, port=8000)\n", {}),
        ("Single", "", {"isolate": False}),
    ],
    ids=["plain", "second form of import", "serves when it is imported", "not concurrent"],
)
def test_a_projects_class_is_served_and_its_other_routes_kept(
    start: StartHost, upstream: Path, name: str, more: str, config: dict[str, Any]
) -> None:
    (upstream / "app.py").write_text(APP.format(name=name) + more)
    host = start(None, **{"app_candidates": ("app:app",), **config})
    assert host.ready()["max_sessions"] == (1 if name == "Single" else DEFAULT_SESSIONS)
    assert host.http("GET", "/anything") == (200, "the project")
    with host.open() as client:
        assert client.step("count") == "1"


@pytest.mark.parametrize("where", ["__init__.py", "client.py"])
@pytest.mark.parametrize("text", ["import a_library_of_trainers", "import os; os._exit(3)"])
def test_a_package_that_only_trainers_can_import_is_served_without_it(
    serve: StartHost, upstream: Path, where: str, text: str
) -> None:
    package = upstream / "package"
    (package / "server").mkdir(parents=True)
    (package / "__init__.py").write_text("from .client import Client\n")
    (package / "client.py").write_text("Client = object\n")
    (package / where).write_text(text)
    (package / "server" / "__init__.py").write_text("")
    (package / "models.py").write_text("size = 1\n")
    guarded = "try:\n  from ..models import size\nexcept ImportError:\n  from models import size\n"
    own = "class Mine(Counter): pass\napp = create_app(Mine,"  # whose code is read
    app = APP.format(name="Counter").replace("app = create_app(Counter,", own)
    (package / "server" / "app.py").write_text(guarded + app)
    paths = (str(upstream), str(package))
    host = serve(
        None, app_candidates=("package.server.app:app", "server.app:app"), import_paths=paths
    )
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"


@pytest.mark.parametrize(
    ("how", "text"), [("os._exit(3)", "os._exit(3)"), ("sys.exit('no GPU')", "no GPU")]
)
@pytest.mark.parametrize("config", [{"what": "ending:Class"}, {"app_candidates": ("ending:app",)}])
def test_an_import_that_ends_the_process_is_named(
    start: StartHost, tmp_path: Path, how: str, text: str, config: dict[str, Any]
) -> None:
    (tmp_path / "ending.py").write_text(f"import os, sys\n{how}\n")
    message, lines = failure(start(**{"what": None, **config}))
    assert message == f"SystemExit: {text}"
    assert f'File "{tmp_path}/ending.py", line 2, in <module>' in "\n".join(lines)


def test_an_import_that_takes_long_writes_its_stack_and_its_children_end_as_they_say(
    serve: StartHost, tmp_path: Path
) -> None:
    code = "import os, ctypes\nif not (pid := os.fork()): os._exit(7)\n"
    code += "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
    code += "ctypes.PyDLL(None).sleep(15)  # holds Python's lock\n"
    (tmp_path / "slow.py").write_text(f"{code}from samples import *\n")
    host = serve("slow:Counter")
    assert f'File "{tmp_path}/slow.py", line 4 in <module>' in host.log.read_text()
    assert "the import took " in host.log.read_text()


def test_the_stack_of_python_code_that_an_import_runs_is_written_without_faulthandler(
    tmp_path: Path,
) -> None:
    """`faulthandler` reads frames that change meanwhile, and may crash."""
    (tmp_path / "busy.py").write_text(
        "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end:\n  pass\n"
    )
    code = f"import sys, uvicorn\nsys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from openenvd.env_host.startup import contained_import\n"
    code += "with contained_import(0.2): import busy\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("busy.py") == 1
    assert re.search(r'busy.py", line [34] in <module>', done.stderr)


def test_an_import_that_fails_writes_no_stack_later() -> None:
    code = "import time, uvicorn\nfrom openenvd.env_host.startup import contained_import\ntry:\n"
    code += " with contained_import(0.5): raise OSError\nexcept OSError: time.sleep(1)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stderr == b""


def test_the_second_form_of_an_import_finds_nothing_of_the_first(
    serve: StartHost, upstream: Path
) -> None:
    count = "import registry\nregistry.entries.append(1)\nassert len(registry.entries) < 2\n"
    (upstream / "package").mkdir()
    (upstream / "package" / "app.py").write_text(f"{count}from .registry import entries\n")
    (upstream / "registry.py").write_text("entries = []\n")
    (upstream / "app.py").write_text(count + APP.format(name="Counter"))
    serve(None, app_candidates=("package.app:app", "app:app"))


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
    sentence = "/p/openenv.yaml, line 5: app: No module named 'envs'; serving app:app instead"
    assert host.ready()["notes"][0] == sentence
    assert sentence in host.log.read_text()


MISSING = "import a_module_that_nobody_has\n"
PLACE = "/p/openenv.yaml, line 5: app: "
NO_ASGI = ", and no ASGI application"
# Text of `app.py`, and what is configured; what is told.
NO_APPS: dict[str, tuple[str, dict[str, Any], str]] = {
    "the most informative": (
        MISSING,
        {"app_candidates": ("package.app:app", "app:app")},
        "No module named 'a_module_that_nobody_has'",
    ),
    "one that fails is not replaced": (
        MISSING,
        {"app_candidates": ("app:app",), "app_fallbacks": ("samples:os",)},
        "No module named 'a_module_that_nobody_has'",
    ),
    "named by nothing": (
        "",
        {"app_candidates": ("server.app:app",)},
        "no app was found, and none is named: No module named 'server'; tried server.app:app",
    ),
    "named by a manifest": (
        "",
        ABSENT,
        f"{PLACE}No module named 'envs'; tried package.envs.app:app, envs.app",
    ),
    "named by a manifest, not in its module": (
        "",
        {**ABSENT, "app_candidates": ("samples:other",)},
        f"{PLACE}module 'samples' has no attribute 'other'; tried samples:other",
    ),
    "a function": ("def app(): raise SystemExit", {}, f"app:app is of the type function{NO_ASGI}"),
    "a coroutine function of one argument": (
        "async def app(request): ...",
        {},
        f"app:app is of the type function{NO_ASGI}",
    ),
    "a class": (
        "class app:\n    async def __call__(self, scope, receive, send): ...",
        {},
        f"app:app is a class{NO_ASGI}",
    ),
    "a class of C code": ("app = dict", {}, f"app:app is a class{NO_ASGI}"),
    "a number": ("app = 3", {}, f"app:app is of the type int{NO_ASGI}"),
    "WSGI": (
        "class Flask:\n  wsgi_app = 1\n  def __call__(self, environ, start): ...\napp = Flask()",
        {},
        f"app:app is of the type Flask{NO_ASGI}",
    ),
    "a router": (
        "from fastapi import APIRouter\napp = APIRouter()",
        {},
        f"app:app is of the type APIRouter{NO_ASGI}",
    ),
    "a group": (
        "class Group:\n    def __call__(self, *args, **named): ...\napp = Group()",
        {},
        f"app:app is of the type Group{NO_ASGI}",
    ),
}


@pytest.mark.parametrize(("text", "config", "expected"), NO_APPS.values(), ids=NO_APPS)
def test_why_there_is_no_app_is_told(
    start: StartHost, upstream: Path, text: str, config: dict[str, Any], expected: str
) -> None:
    if text:
        (upstream / "app.py").write_text(text)
    message, lines = failure(start(None, **{"app_candidates": ("app:app",), **config}))
    assert expected in message
    assert ("WSGI app in asgiref.wsgi.WsgiToAsgi" in message) is (NO_ASGI in expected)
    assert lines == [] or text == MISSING


UPSTREAMS = APP.format(name="Counter")
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
    await socket.receive_text()
    await socket.send_text('{"type": "state", "data": {}}')
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
    assert ready["route"] == (None if "made" in more else "POST /reset {}")
    assert any(note.startswith(NO_SESSIONS) for note in ready["notes"])
    assert host.http("POST", "/reset", {}) == (200, {"observation": 0})
    for path in ("/health", "/capacity"):
        assert host.http("GET", path)[1]["route"] == ready["route"]
    address = f"http://127.0.0.1:{host.port}"
    with pytest.raises(SessionFailed) as failed:
        asyncio.run(Session.open(address))
    assert str(failed.value) == f"{address}: {NO_SESSIONS}"


def test_an_own_websocket_that_does_not_speak_the_protocol_is_no_session(
    start: StartHost, tmp_path: Path
) -> None:
    own = OWN_SESSIONS.replace('{"type": "state", "data": {}}', "my own")
    (tmp_path / "app.py").write_text(FOREIGN + own.replace("inner", "app"))
    host = start(None, app_candidates=("app:app",))
    assert host.ready()["notes"] == [f"{NO_SESSIONS}; it is served as it is"]
    with (
        client.Session(f"http://127.0.0.1:{host.port}") as session,
        pytest.raises(client.SessionError, match="no message of OpenEnv's protocol: my own"),
    ):
        session.reset()


@pytest.mark.parametrize(
    ("more", "route"),
    [
        ("app = FastAPI(); app.get('/health')(reset); app.mount('/env', inner)", "GET /health"),
        ("inner.post('/reset')(reset); app = FastAPI(); app.mount('/env', inner)", "/env/reset {}"),
        ("app = FastAPI(); app.post('/api/reset')(lambda: 0)", "POST /api/reset {}"),
    ],
)
def test_a_route_to_try_begins_an_episode_if_one_does(more: str, route: str) -> None:
    names: dict[str, Any] = {}
    exec(FOREIGN + more, names)
    assert str(example_route(names["app"])).endswith(route)


def test_an_app_may_be_made_by_a_function(serve: StartHost, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(FOREIGN + "made = app\ndef create_app():\n    return made\n")
    host = serve(None, app_candidates=("app:create_app()",))
    assert host.http("POST", "/reset", {}) == (200, {"observation": 0})


FAILS = """
class Fails:
    def __init__(self, app):
        self.app = app
    async def __call__(self, scope, *rest):
        if scope["type"] != "lifespan":
            raise RuntimeError("no licence")
        await self.app(scope, *rest)
app.add_middleware(Fails)
"""


@pytest.mark.parametrize(("made", "what"), [(FOREIGN, "request"), (UPSTREAMS, "handshake")])
def test_a_launch_says_so_where_the_middleware_of_an_app_fails(
    start: StartHost, upstream: Path, made: str, what: str
) -> None:
    (upstream / "app.py").write_text(made + FAILS)
    host = start(None, app_candidates=("app:app",))
    host.ready()
    text = f"a {what} with a client's usual headers is answered 500: RuntimeError: no licence ("
    assert text in host.log.read_text()


def test_serve_as_is_does_not_change_the_projects_app(start: StartHost, upstream: Path) -> None:
    (upstream / "app.py").write_text(APP.format(name="Counter"))
    said = {"OpenEnvd-Environment": "counter"}
    began = int(time.time())
    host = start(None, app_candidates=("app:app",), serve_as_is=True, headers=said)
    assert host.ready()["serving"] == "as_is"
    assert host.http("POST", "/mcp", {}) == (200, "upstream's")
    with urlopen(f"http://127.0.0.1:{host.port}/health", timeout=10.0) as answer:
        assert answer.headers["OpenEnvd-Environment"] == "counter"
        served_at = parsedate_to_datetime(answer.headers["Date"]).timestamp()
    assert began <= served_at <= time.time()
    assert host.stop() == 0
    host.note_that(stopped_by=15)


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
    ("head", "env", "is_imported"),
    [
        ("", {}, False),
        ("from openenv.core.env_server import http_server\n", {}, False),
        ("import gradio\n", {}, True),
        (GUARDED.format("ImportError"), {}, True),
        (GUARDED.format("ModuleNotFoundError"), {}, True),
        ("from page import Blocks\n", {}, True),
        ("import openenv.core.env_server.web_interface\n", {}, True),
        (OF_GRADIO, {}, True),
        ("", {"ENABLE_WEB_INTERFACE": "false"}, False),
        ("", {"ENABLE_WEB_INTERFACE": "True"}, True),
    ],
)
def test_gradio_is_kept_out_of_upstreams_package_and_of_no_code_of_the_project(
    serve: StartHost, gradio: Path, head: str, env: dict[str, str], is_imported: bool
) -> None:
    (gradio / "page.py").write_text("from gradio import Blocks\n")
    app = APP.format(name="Counter")
    text = app.replace(USUAL, head) if head == OF_GRADIO else head + app
    (gradio / "app.py").write_text(text)
    host = serve(None, app_candidates=("app:app",), env=env)
    assert host.log.read_text().count("gradio was imported") == is_imported
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"


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
    serve: StartHost, upstream: Path, tmp_path: Path
) -> None:
    packages = tmp_path / "venvs" / "one" / "packages"
    packages.mkdir(parents=True)
    for name in ("wanted", "unwanted"):
        (packages / f"{name}.py").write_text("")
    (upstream / "app.py").write_text("import wanted\n" + APP.format(name="Counter"))
    serve(
        None,
        app_candidates=("app:app",),
        import_paths=(str(upstream), str(packages)),
        venv=str(tmp_path / "venvs" / "one"),
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    )
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
    with serving(config, tmp_path, python=str(python), env={"PYTHONDONTWRITEBYTECODE": "1"}):
        pass
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
    known = isinstance(Result(), Result), isinstance(1, Client)
    return Client.kind, type(Client("x")).__module__, *known, Text.kind
"""
USING = """
from openenv.core.env_server.mcp_environment import use
class Using(Counter):
    def do_use(self, action):
        return str(use())
app = create_app(Using, Do, Seen)
"""


@pytest.mark.parametrize("more", ["", "class Own(Client):\n    pass\n"], ids=["used", "at once"])
def test_fastmcp_is_imported_when_upstreams_class_uses_it(
    serve: StartHost, upstream: Path, more: str
) -> None:
    for name, text in {
        "fastmcp": "print('fastmcp was imported')\nclass Client(str):\n    kind = 'real'\n",
        "fastmcp.client": "",
        "fastmcp.client.client": "class Result: pass\n",
        "mcp": "",
        "mcp.types": "class Text:\n    kind = 'text'\n",
    }.items():
        package = upstream.joinpath(*name.split("."))
        package.mkdir()
        (package / "__init__.py").write_text(text)
    server = upstream / "openenv" / "core" / "env_server"
    (server / "mcp_environment.py").write_text(MCP_ENVIRONMENT + more)
    (server / "http_server.py").write_text("from . import mcp_environment\n" + SERVER)
    (upstream / "app.py").write_text(APP.format(name="Counter") + USING)
    host = serve(None, app_candidates=("app:app",))
    assert ("fastmcp was imported" in host.log.read_text()) is bool(more)
    with host.open() as client:
        answer = client.ask("step", {"what": "use"})
    assert answer["data"]["observation"]["text"] == "('real', 'fastmcp', True, False, 'text')"
    assert "fastmcp was imported" in host.log.read_text()
