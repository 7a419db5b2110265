# SPDX-License-Identifier: Apache-2.0
"""What programs are given on their nodes, by Slurm's jobs and by Ray's actors."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments.engines.host_options import listen, server_variables
from openenvd.schema.protocol import HOST_CONFIG_VARIABLE, HOST_OPTIONS_VARIABLE
from openenvd.system.net.listening_sockets import http_address


def plan(folder: Path, **options: object) -> dict[str, Any]:
    """A plan of a replica whose imports go through a link."""
    config = json.dumps({"import_paths": ["/srv"]})
    env = {HOST_OPTIONS_VARIABLE: json.dumps(options), HOST_CONFIG_VARIABLE: config}
    return {"env": env, "links": {"my_env": str(folder)}}


def options_of(environ: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(environ[HOST_OPTIONS_VARIABLE])
    return found


def test_a_port_that_is_taken_is_replaced_and_another_machines_address_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listeners = listen("localhost", port)
    assert listeners[0].getsockname()[0] == "127.0.0.1"
    assert listeners[0].getsockname()[1] != port
    for each in listeners:
        each.close()
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_a_server_has_links_first_and_the_address_and_limits_of_its_node(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for _ in range(2):  # of a second instance of the replica, too
        found = options_of(server_variables(plan(project), "127.0.0.1", tmp_path, owns_cgroup=True))
    assert found["import_paths"] == [str(tmp_path / "imports"), "/srv"]
    assert (tmp_path / "imports" / "my_env").resolve() == project
    asked = plan(tmp_path, allow_origin=["https://notebook.example"])
    found = options_of(server_variables(asked, "fd00::7", tmp_path, owns_cgroup=True))
    assert found["allow_origin"] == ["https://notebook.example", "http://[fd00::7]"]
    assert "allow_origin" not in options_of(
        server_variables(plan(tmp_path), "127.0.0.1", tmp_path, owns_cgroup=False)
    )
    assert http_address("fd00::7", 8000) == "http://[fd00::7]:8000"
    asked = plan(tmp_path, memory_bytes=1, cores=None)
    found = options_of(
        server_variables(asked, "127.0.0.1", tmp_path, owns_cgroup=True, memory_bytes=2, cores=3)
    )
    assert (found["memory_bytes"], found["cores"]) == (1, 3)
