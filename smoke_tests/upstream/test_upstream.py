# SPDX-License-Identifier: Apache-2.0
"""Upstream's package installed beside ours: its clients, its commands, its pages."""

import re
from pathlib import Path

import pytest

from ..conftest import REPOSITORY, Machine, output_of
from ..pages import name_of, pages_that_need, run_blocks, script_of

SHOWN_ADDRESS = "http://127.0.0.1:21000"


PROVIDER = """
import asyncio, sys
from openenv import GenericEnvClient
from openenvd.client.upstream import OpenEnvdProvider

async def use():
    for use_docker in (True, False):
        provider = OpenEnvdProvider(sys.argv[1])
        env = await GenericEnvClient.from_env("me/echo", use_docker=use_docker, provider=provider)
        async with env:
            await env.reset()
            result = await env.step({"message": "hello"})
            assert result.observation["echoed_message"] == "hello", result

asyncio.run(use())
print("provider ok")
"""


def run_upstream(python: Path, program: str, *arguments: str, cwd: Path, machine: Machine) -> str:
    return output_of(python, "-c", program, *arguments, cwd=cwd, env=machine.environ, timeout=180)


def test_the_readme_s_python_runs_as_it_stands_beside_upstreams_package(
    machine: Machine, both: Path
) -> None:
    [program] = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL
    )
    machine.ok("launch", "echo")
    assert "hello" in run_upstream(both, program, cwd=machine.home, machine=machine)


def test_our_provider_serves_upstream_from_env(machine: Machine, both: Path) -> None:
    run_upstream(both, PROVIDER, "echo", cwd=machine.home.parent, machine=machine)
    assert machine.status()["environments"] == []


def test_both_sets_of_commands_work_where_both_are_installed(
    machine: Machine, both: Path, tmp_path: Path
) -> None:
    machine.command = str(both.with_name("openenv"))
    words = machine.ok("--help").out
    for name in ("launch", "status", "init", "push", "catalog"):
        assert name in words
    machine.ok("init", "made_here", "-o", str(tmp_path), cwd=tmp_path)
    assert (tmp_path / "made_here" / "openenv.yaml").exists()
    machine.ok("launch", "echo")
    assert machine.environment("echo")["state"] == "READY"


@pytest.mark.parametrize("page", pages_that_need("upstream"), ids=name_of)
def test_the_blocks_of_a_page_that_need_upstreams_package_run(
    machine: Machine, both: Path, page: Path
) -> None:
    """The test's environment replaces an address and its token in them."""
    machine.command = str(both.with_name("openenv"))
    replaced = {}
    if SHOWN_ADDRESS in script_of(page, "upstream"):
        launch = machine.ok("launch", "echo", "--token", "a-token-of-the-tests", "--json").json
        address = launch["environment"]["address"]
        replaced = {SHOWN_ADDRESS: address, "TOKEN": "a-token-of-the-tests"}
    run_blocks(machine, page, "upstream", replaced)
