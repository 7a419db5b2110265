# SPDX-License-Identifier: Apache-2.0
"""A project may call its files as modules that the host needs: they are no concern of the host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from openenvd.environments.sources.program import HOST_PRELOAD

from ..conftest import StartHost

# Besides the standard library: what the host imports, and what that imports.
LIBRARIES = {"annotated_types", "anyio", "click", "h11", "httptools", "orjson", "pydantic"}
LIBRARIES |= {"pydantic_core", "typing_extensions", "typing_inspection", "uvicorn", "uvloop"}
OF_THE_SAMPLES = {"sqlite3", "_sqlite3"}
NAMES = sys.stdlib_module_names - set(sys.builtin_module_names) - OF_THE_SAMPLES | LIBRARIES
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


@pytest.mark.parametrize("isolate", [False, True], ids=["shared", "isolated"])
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
    for name in ours_alone():
        (tmp_path / f"{name}.py").write_text("KIND = 'the project'\n")
        (tmp_path / "user.py").write_text(
            f"from {name} import KIND\nfrom plain import Plain\n\nassert KIND == 'the project'\n"
        )
        host = serve("user:Plain")
        assert host.stop() == 0


@pytest.mark.parametrize(
    "more", [[], ["openenvd.environments.shim.fork_server"]], ids=["host", "fork server"]
)
def test_upstream_s_server_has_imported_all_that_the_host_has_but_for_some(more: list[str]) -> None:
    ours = modules_after(f"import {', '.join([*more, *HOST_PRELOAD])}")
    extra = (ours - modules_after(SERVER_OF_UPSTREAM)) & sys.stdlib_module_names
    public = {name for name in extra if not name.startswith("_")} - set(sys.builtin_module_names)
    assert public - NEEDED == ours_alone()


def modules_after(code: str) -> set[str]:
    """The top-level names of all modules that a fresh interpreter has after these imports."""
    return words_of(
        f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    )


def ours_alone() -> set[str]:
    """Not imported here, where it would take the host's view of modules in the tests' process."""
    return words_of("from openenvd.env_host import preload; print(*preload.OURS_ALONE)")


def words_of(code: str) -> set[str]:
    command = [sys.executable, "-P", "-c", code]
    return set(subprocess.check_output(command, text=True).split())
