# SPDX-License-Identifier: Apache-2.0
"""The parts of libraries that are used here and that their documentation does not promise.

A new version may take any of them away. Each test fails with the name of what is gone and of its
user; the nightly workflow runs them against the newest versions, before users do.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pydantic
import pytest
import sqlalchemy
from sqlalchemy.dialects import sqlite
from uvicorn.config import Config
from uvicorn.server import Server, ServerState

SANSIO = "uvicorn.protocols.websockets.websockets_sansio_impl"
USED = {  # what: who uses it
    "uvicorn.protocols.http.auto:AutoHTTPProtocol": "env_host/serving",
    f"{SANSIO}:WebSocketsSansIOProtocol": "env_host/serving",
    "uvicorn.server:Server.capture_signals": "env_host/serving",
    "uvicorn.server:Server.main_loop": "env_host/serving",
    "uvicorn.server:Server.startup": "env_host/serving",
    "uvicorn.server:Server.shutdown": "env_host/serving",
    "websockets.speedups:apply_mask": "env_host/websocket",
    "threading:_shutdown": "system/process/forking.py",
}


@pytest.mark.parametrize(("name", "user"), USED.items(), ids=USED)
def test_a_private_part_exists(name: str, user: str) -> None:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        assert hasattr(found, part), f"{name} is gone; {user} uses it"
        found = getattr(found, part)


def test_uvicorn_calls_a_protocol_with_the_arguments_that_ours_passes_on() -> None:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    parameters = list(inspect.signature(AutoHTTPProtocol.__init__).parameters)
    assert parameters[1:4] == ["config", "server_state", "app_state"]


def test_uvicorns_server_keeps_its_connections_in_a_set() -> None:
    assert isinstance(ServerState().connections, set)
    assert Server(Config(lambda: None)).server_state.connections == set()


def test_uvicorns_protocols_read_the_headers_that_every_response_has_from_the_server() -> None:
    from uvicorn.protocols.http import h11_impl

    assert "self.server_state.default_headers" in inspect.getsource(h11_impl)
    assert ServerState().default_headers == []


def test_the_daemon_starts_without_uvicorns_command_line_and_pydantics_version_1() -> None:
    script = "import sys; from openenvd.server.__main__ import _import_daemon; _import_daemon();"
    script += "print('click' in sys.modules, sys.modules.get('pydantic.v1'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False None\n", "")


def test_a_pydantic_model_shows_its_core_schema_and_serializer() -> None:
    class Model(pydantic.BaseModel):
        x: int = 0

    assert isinstance(Model.__pydantic_core_schema__, dict)
    assert Model.__pydantic_serializer__.to_json(Model(x=1), exclude=set()) == b'{"x":1}'


def test_a_compiled_statement_has_the_order_of_its_parameters() -> None:
    table = sqlalchemy.table("t", sqlalchemy.column("a"), sqlalchemy.column("b"))
    statement = table.update().where(table.c.a == sqlalchemy.bindparam("given"))
    compiled: Any = statement.compile(
        dialect=sqlite.dialect(paramstyle="qmark"), column_keys=("b", "given")
    )
    assert compiled.positiontup == ["b", "given"]


def test_a_connection_shows_the_drivers_connection() -> None:
    with sqlalchemy.create_engine("sqlite://").connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        assert driver.execute("select 1").fetchone() == (1,)
