# SPDX-License-Identifier: Apache-2.0
"""The web interface of a generated project, with several shards."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from websockets.sync.client import connect

from ..conftest import Machine
from .test_upstream import run_upstream

WAIT_SECONDS = 60.0
SESSIONS = 8  # kept open, so that there is more than one shard

GRADIO_CLIENT = """
import sys
from gradio_client import Client

client = Client(sys.argv[1] + "/web/", verbose=False)
named = client.view_api(print_info=False, return_format="dict")["named_endpoints"]
reset = next(name for name in named if "reset" in name)
for _ in range(3):
    assert client.predict(api_name=reset), "no answer"
print("gradio client ok")
"""


def ask(address: str, method: str, path: str, body: Any = None) -> Any:
    """Send one request on a new connection; returns its answer."""
    headers = {"content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = Request(address + path, data, headers, method=method)
    with urlopen(request, timeout=WAIT_SECONDS) as response:
        return json.load(response)


def files_of(folder: Path) -> dict[Path, bytes]:
    files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {path: path.read_bytes() for path in files}


def test_the_web_interface_has_one_environment_with_several_shards(
    machine: Machine, upstream: Path, project: Path
) -> None:
    """Serving the project changes none of its files."""
    before = files_of(project)
    words = ["--shards", "4", "--max-sessions", "16", "-e", "ENABLE_WEB_INTERFACE=true"]
    machine.ok("launch", str(project), *words, timeout=600)
    environment = machine.environment("my_env")
    address = environment["address"]
    with ExitStack() as stack:
        for _ in range(SESSIONS):
            stack.enter_context(connect(f"{address.replace('http', 'ws')}/ws"))
        for _ in range(5):
            ask(address, "POST", "/web/reset", {})
            for _ in range(3):
                ask(address, "POST", "/web/step", {"action": {"message": "hello"}})
            assert ask(address, "GET", "/web/state")["step_count"] == 3
        say = run_upstream(upstream, GRADIO_CLIENT, address, cwd=machine.home, machine=machine)
        assert "gradio client ok" in say
    assert files_of(project) == before
