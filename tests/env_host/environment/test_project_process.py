# SPDX-License-Identifier: Apache-2.0
"""What a project sets and patches at its import, its event loop, and the names of its files.

Sessions find signals and settings as the import has set them.

The host needs some of them itself (SIGCHLD, SIGUSR1, descriptors), in other processes than those
that serve sessions, or until they serve.
"""

import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from openenvd.schema.protocol import HOST_LIBRARIES

from ..conftest import StartHost

pytestmark = pytest.mark.usefixtures("programs")
SETTINGS = """
import gc, os, resource, signal, socket, subprocess, sys, threading, time
from plain import Bare, Seen

heard = []

def hear(number, frame):
    heard.append(number)
    if number == signal.SIGTERM:
        with open(os.environ["FAREWELL"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        sys.exit(3)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, hear)
if "LEAVES_THREAD" in os.environ:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.setitimer(signal.ITIMER_VIRTUAL, 3600, 7)
gc.disable()
gc.set_threshold(123, 4, 5)
resource.setrlimit(resource.RLIMIT_NOFILE, (400, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
threading.stack_size(16 << 20)
socket.setdefaulttimeout(7)
sys.setrecursionlimit(3210)
os.umask(0o027)
os.chdir(os.environ["FOLDER"])


class Settings(Bare):
    def reset(self, **kwargs):
        umask = os.umask(0)
        os.umask(umask)
        return Seen(found={
            "pid": os.getpid(),
            "ignores": signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN,
            "collects": gc.isenabled(),
            "threshold": gc.get_threshold(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "stack": threading.stack_size(),
            "timeout": socket.getdefaulttimeout(),
            "recursion": sys.getrecursionlimit(),
            "umask": umask,
            "folder": os.getcwd(),
            "timer": signal.getitimer(signal.ITIMER_VIRTUAL)[1],
            "child": subprocess.run(["sh", "-c", "exit 3"]).returncode,
        })

    def step(self, action):
        heard.clear()
        for number in action.signals:
            os.kill(os.getpid(), number)
        deadline = time.monotonic() + 30
        while len(heard) < len(action.signals) and time.monotonic() < deadline:
            time.sleep(0.01)
        return Seen(found={"heard": sorted(heard)})
"""
OWN_SIGNALS = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT]


@pytest.mark.parametrize("kind", ["forked", "program"])
def test_sessions_find_what_the_import_has_set(
    serve: StartHost, tmp_path: Path, isolate: bool, kind: str
) -> None:
    (tmp_path / "settings.py").write_text(SETTINGS)
    folder, farewell = tmp_path / "elsewhere", tmp_path / "farewell"
    folder.mkdir()
    env = {"FAREWELL": str(farewell), "FOLDER": str(folder), "OPENENVD_TRIAL": "1"}
    if kind == "program":
        env["LEAVES_THREAD"] = "1"
    host = serve("settings:Settings", isolate=isolate, max_sessions=2, env=env)
    with host.open() as client:
        found = client.ask("reset")["data"]["observation"]["found"]
        pid = found.pop("pid")
        assert found == {
            "ignores": True,
            "collects": False,
            "threshold": [123, 4, 5],
            "files": 400,
            "stack": 16 << 20,
            "timeout": 7.0,
            "recursion": 3210,
            "umask": 0o027,
            "folder": str(folder),
            "timer": 7.0,
            "child": 0,  # as Python says it where SIGCHLD is ignored
        }
        signals = [int(number) for number in OWN_SIGNALS]
        answer = client.ask("step", {"signals": signals})
        assert answer["data"]["observation"]["found"] == {"heard": sorted(signals)}
        assert host.stop() == 0
    said = farewell.read_text().split()  # in each shard
    assert said
    assert isolate or str(pid) in said


# A project that patches the standard library for its whole process, as gevent and eventlet do


PATCHED = """
import _thread, asyncio, os, queue, select, selectors, subprocess, threading, time

thread_ident, main_ident = threading.get_ident, threading.get_ident()
threading.get_ident = lambda: 7 if thread_ident() == main_ident else thread_ident()
threading._active[7] = threading.main_thread()
threading.main_thread()._ident = 7

def patched(*args, **kwargs):
    raise RuntimeError("patched by the project")

for module, names in {
    _thread: ["start_new_thread"],
    os: ["fork", "wait4", "waitpid"],
    queue: ["SimpleQueue"],
    select: ["epoll", "poll", "select"],
    selectors: ["DefaultSelector"],
    subprocess: ["Popen", "run"],
    time: ["sleep"],
}.items():
    for name in names:
        setattr(module, name, patched)

from plain import Plain


class Patched(Plain):
    pass


class Async(Plain):
    async def reset_async(self, **kwargs):
        return self.reset()

    async def step_async(self, action):
        await asyncio.sleep(0)
        return self.step(action)
"""


@pytest.mark.parametrize("kind", ["Patched", "Async"])
def test_the_host_uses_what_was_there_before(serve: StartHost, kind: str, isolate: bool) -> None:
    how = {"isolate": isolate, "max_sessions": 2, "shards": 2, "env": {"OPENENVD_TRIAL": "1"}}
    host = serve(f"patched:{kind}", files={"patched.py": PATCHED}, **how)
    with host.open() as client, host.open() as other:
        for each in (client, other):
            each.ask("reset")
            for steps in (1, 2):
                answer = each.ask("step", {})
                assert answer["data"]["observation"]["steps"] == steps
    assert host.stop() == 0


# The event loop that a project's code runs on, and libraries that are the host's alone


LIBRARIES = ("uvloop", "httptools")
LOOPS = """
import asyncio, importlib.util, sys
from plain import Bare, Seen


def look():
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    names = ("uvloop", "httptools")
    return {
        "visible": [n for n in names if n in sys.modules or importlib.util.find_spec(n)],
        "used": [n for n in names if f"/{n}/" in loaded],
    }


class Sync(Bare):
    def reset(self, **kwargs):
        return Seen(found=look())


class Async(Sync):
    async def reset_async(self, **kwargs):
        loop = type(asyncio.get_running_loop())
        return Seen(found=look() | {"loop": loop.__module__.partition(".")[0]})

    async def step_async(self, action):
        return Seen()
"""


def make_venv(folder: Path, *, is_projects: bool) -> Path:
    """A project's environment; uvloop and httptools are its own, or the host's."""
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    libraries = folder / HOST_LIBRARIES
    libraries.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        is_hosts = path.name.startswith(LIBRARIES) and not is_projects
        if path.suffix != ".pth":
            ((libraries if is_hosts else packages) / path.name).symlink_to(path)
    return folder / "bin" / "python"


@pytest.mark.parametrize("kind", ["Sync", "Async"])
@pytest.mark.parametrize("whose", ["project", "host", "neither"])
def test_a_project_sees_the_loop_and_the_libraries_that_are_its_own(
    start: StartHost, tmp_path: Path, whose: str, kind: str, isolate: bool
) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    python = make_venv(tmp_path / "venv", is_projects=whose == "project")
    if whose == "neither":
        for path in (tmp_path / "venv" / HOST_LIBRARIES).iterdir():
            path.unlink()
    host = start(f"loops:{kind}", venv=str(tmp_path / "venv"), isolate=isolate, python=str(python))
    host.ready()
    with host.open() as client:
        found = client.ask("reset")["data"]["observation"]["found"]
    assert found["visible"] == (list(LIBRARIES) if whose == "project" else [])
    assert found["used"] == ([] if whose == "neither" else list(LIBRARIES))
    if kind == "Async":
        has_uvloop = whose == "project" and not isolate  # it has none that can be forked
        assert found["loop"] == ("uvloop" if has_uvloop else "asyncio")
    assert host.stop() == 0


# A project may call its files as modules that the host needs


# Besides the standard library: what the host imports, and what that imports.
IMPORTED = {"annotated_types", "anyio", "click", "h11", "httptools", "orjson", "pydantic"}
IMPORTED |= {"pydantic_core", "typing_extensions", "typing_inspection", "uvicorn", "uvloop"}
OF_THE_SAMPLES = {"sqlite3", "_sqlite3"}
NAMES = sys.stdlib_module_names - set(sys.builtin_module_names) - OF_THE_SAMPLES | IMPORTED
TRAP = """
from pathlib import Path

with open(Path(__file__).parent / "trapped.txt", "a") as file:
    file.write(f"{__name__}\\n")
raise ImportError(f"the project's {__name__}")
"""
# Pydantic, or another library that every environment uses, needs them; `runpy` is in Python itself.
NEEDED = {"ctypes", "decimal", "fractions", "numbers", "runpy", "unicodedata", "zoneinfo"}
SERVER_OF_UPSTREAM = (
    "import asyncio, uvicorn.lifespan.on, uvicorn.loops.auto, uvicorn.protocols.http.auto, "
    "uvicorn.protocols.websockets.auto"
)


@pytest.mark.parametrize("env_class", ["plain:Plain", "samples:Async"])
def test_no_file_of_the_project_is_taken_for_a_module_of_the_host(
    serve: StartHost, tmp_path: Path, env_class: str, isolate: bool
) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(TRAP)
    imports = "import asyncio, os, sys, threading, time\n"  # which upstream's server has, too
    samples = tmp_path / "samples.py"
    samples.write_text(imports + samples.read_text())
    host = serve(env_class, isolate=isolate, max_sessions=2)
    with host.open() as client:
        for kind, data in (("reset", {}), ("step", {}), ("state", None)):
            assert client.ask(kind, data)["type"] in ("observation", "state")
        assert client.say("no JSON")["type"] == "error"
    assert host.http("POST", "/reset", {})[0] == 200
    for path in ("/schema", "/metadata", "/capacity", "/metrics", "/nothing"):
        host.http("GET", path)
    host.http("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
    assert host.stop() == 0
    trapped = tmp_path / "trapped.txt"
    assert not trapped.exists(), trapped.read_text()


def test_the_project_imports_its_own_file_where_upstream_s_server_lets_it(
    serve: StartHost, tmp_path: Path
) -> None:
    for name in names_in_preload("OURS_ALONE"):
        (tmp_path / f"{name}.py").write_text("KIND = 'the project'\n")
        (tmp_path / "user.py").write_text(
            f"from {name} import KIND\nfrom plain import Plain\n\nassert KIND == 'the project'\n"
        )
        host = serve("user:Plain")
        assert host.stop() == 0


FORKED = """
import openenvd.server.__main__, openenvd.environments.shim.forked
from openenvd.server.operations import registry
from openenvd.system.process.forking import preload
preload(registry.PRELOAD)
"""


@pytest.mark.parametrize("code", ["import openenvd.env_host.preload", FORKED], ids=["host", "fork"])
def test_upstream_s_server_has_imported_all_that_the_host_has_but_for_some(code: str) -> None:
    ours = modules_after(code)
    extra = (ours - modules_after(SERVER_OF_UPSTREAM)) & sys.stdlib_module_names
    public = {name for name in extra if not name.startswith("_")} - set(sys.builtin_module_names)
    public -= names_in_preload("ZYGOTES") if code == FORKED else set()
    assert public - NEEDED == names_in_preload("OURS_ALONE")


def modules_after(code: str) -> set[str]:
    """The top-level names of all modules that a fresh interpreter has after these imports."""
    return words_of(
        f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    )


def names_in_preload(name: str) -> set[str]:
    """Not imported here, where it would take the host's view of modules in the tests' process."""
    return words_of(f"from openenvd.env_host import preload; print(*preload.{name})")


def words_of(code: str) -> set[str]:
    command = [sys.executable, "-P", "-c", code]
    return set(subprocess.check_output(command, text=True).split())


GEVENT = """
import os, subprocess

saved = {
    "os": {"fork": os.fork, "waitpid": os.waitpid},
    "subprocess": {"Popen": subprocess.Popen, "run": subprocess.run},
}

def watched(*args, **kwargs):
    raise TypeError("child watchers are only available on the default loop")

os.fork = os.waitpid = subprocess.Popen = subprocess.run = watched
"""
STARTS = """
import gevent.monkey, os, subprocess
from plain import Plain

class Starts(Plain):
    def step(self, action, **kwargs):
        subprocess.run(["true"], check=True)
        if not (pid := os.fork()):
            os._exit(0)
        os.waitpid(pid, 0)
        return super().step(action, **kwargs)
"""


def test_a_step_starts_children_although_gevent_watches_them_on_the_main_thread_alone(
    serve: StartHost, tmp_path: Path, isolate: bool
) -> None:
    (tmp_path / "gevent").mkdir()
    (tmp_path / "gevent" / "monkey.py").write_text(GEVENT)
    (tmp_path / "starts.py").write_text(STARTS)
    with serve("starts:Starts", isolate=isolate).open() as client:
        client.ask("reset")
        assert client.ask("step", {})["data"]["observation"]["steps"] == 1
