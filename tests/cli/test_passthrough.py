# SPDX-License-Identifier: Apache-2.0
"""Upstream's commands through ours: a stand-in package takes upstream's place."""

import sys
from pathlib import Path

import pytest

from openenvd.cli import passthrough

from ..client.fake_daemon import FakeDaemon, new_environment, new_request
from .conftest import Command

UPSTREAM = """
import sys

def main():
    print("upstream", sys.argv)
    sys.exit(5 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site" / "openenv"
    (folder / "cli").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported for nothing')\n")
    (folder / "cli" / "__init__.py").write_text("")
    (folder / "cli" / "__main__.py").write_text(UPSTREAM)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    yield_modules = [name for name in sys.modules if name.split(".")[0] == "openenv"]
    for name in yield_modules:
        monkeypatch.delitem(sys.modules, name)
    return folder


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passthrough, "find_spec", lambda _name: None)


def test_help_lists_upstreams_commands_unimported(command: Command, upstream: Path) -> None:
    out = command("--help").out
    assert "Upstream's commands" in out
    assert "init" in out
    assert "openenv" not in sys.modules
    assert "validate" in command("valdate").err


def test_a_missing_upstream_command_is_run_by_uv(
    command: Command, absent: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Upstream's commands" not in command("--help").out
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\nexit 3\n')
    uv.chmod(0o755)
    monkeypatch.setattr("uv.find_uv_bin", lambda: str(uv))
    answer = command("init", "my_env")
    assert (answer.code, "uvx --from openenv openenv" in answer.err) == (3, True)
    assert (tmp_path / "words").read_text() == "tool run --from openenv openenv init my_env\n"


@pytest.mark.parametrize(("arguments", "code"), [(["init", "--help"], 0), (["push", "--fail"], 5)])
def test_all_arguments_are_handed_on(
    command: Command, upstream: Path, arguments: list[str], code: int
) -> None:
    (upstream / "__init__.py").write_text("")
    answer = command(*arguments)
    for name in [name for name in sys.modules if name.split(".")[0] == "openenv"]:
        del sys.modules[name]
    assert answer.code == code
    assert answer.out == f"upstream {['openenv', *arguments]}\n"


def test_launch_prints_code_for_upstreams_client_where_it_is_installed(
    command: Command, fake: FakeDaemon, upstream: Path
) -> None:
    request = new_request(result={"environment": new_environment(has_token=True)})
    fake.post("/v1/requests", (202, {"request_id": request["id"], "request": request}))
    fake.ends(request)
    base_url = "http://127.0.0.1:21000?token=a-token-of-the-tests"
    fake.get("/v1/environments/trial/base_url", {"base_url": base_url})
    assert f'GenericEnvClient(base_url="{base_url}")' in command("launch", "echo").out
