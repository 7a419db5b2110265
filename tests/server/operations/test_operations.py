# SPDX-License-Identifier: Apache-2.0
"""Operations as a worker calls them: from a JSON payload to a JSON result, or a clear failure."""

import json
import os
import resource
import secrets
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from openenvd.environments import run_files
from openenvd.environments.access import ask, base_url_by_name
from openenvd.environments.engines.base import Check
from openenvd.schema.errors import EnvironmentsError, NotAnswering
from openenvd.schema.layout import Layout
from openenvd.schema.spec import EnvironmentSpec
from openenvd.server.operations import check
from openenvd.server.operations.launch import Launch, losses
from openenvd.system.net.access import without_token

from .conftest import Run


def test_a_repeated_launch_replaces_the_replicas_of_its_first_attempt(
    run: Run, layout: Layout
) -> None:
    first = run("launch", source="echo")["environment"]["replicas"][0]
    second = run("launch", source="echo")["environment"]["replicas"][0]
    assert second["pid"] != first["pid"]
    assert not psutil.pid_exists(first["pid"])
    assert len(run_files.all_of(layout.runs)) == 1


def test_an_update_says_what_it_takes_away_by_leaving_it_out(
    run: Run, layout: Layout, capfd: pytest.CaptureFixture[str]
) -> None:
    run("launch", source="echo", token="auto", replicas=2)
    before = run_files.all_of(layout.runs)
    capfd.readouterr()
    update = {"name": "echo", "source": "echo", "replaces": before[0].request_id}
    Launch.call(update, secrets.token_hex(8), str(layout.home), lambda _: None)
    said = capfd.readouterr().out
    assert "has no token: every user of this machine can connect (--token)" in said
    assert "the new generation has 1 replica, not 2 (--replicas)" in said
    Launch.call({**update, "token": "auto", "replicas": 2}, "0", str(layout.home), lambda _: None)
    assert "the new generation" not in capfd.readouterr().out
    at_gateway = replace(before[0], data={**before[0].data, "address": "http://x"})
    assert "(--gateway)" in "".join(losses(EnvironmentSpec("echo", "echo"), [at_gateway]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"source": "ehco"}, ["ehco", "did you mean echo?"]),
        ({"source": "."}, ["has no openenv.yaml"]),
        ({"source": "echo", "name": "../escape"}, ["../escape", "--name"]),
        ({"source": "echo", "replicas": 2, "max_sessions": 1}, ["cannot share 1 session"]),
        ({"source": "echo", "serve_as_is": True}, ["no app"]),
        (
            {"source": "echo", "provider": "kubernetes"},
            [
                "kubernetes runs images that its nodes pull, and echo is none",
                "openenv image build echo --tag REGISTRY/echo:1",
                "docker://REGISTRY/echo:1 in its place",
            ],
        ),
        (
            {"source": "docker://an/image:1", "provider": "kubernetes", "with_packages": ["numpy"]},
            ["nothing can be installed into the image an/image:1"],
        ),
        (
            {"source": "docker://an/image:1", "provider": "local"},
            ["an/image:1 is an image, and local runs none", "--provider docker"],
        ),
    ],
)
def test_a_launch_that_can_never_work_is_invalid(
    run: Run, layout: Layout, tmp_path: Path, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(EnvironmentsError) as caught:
        run("launch", cwd=str(tmp_path), **fields)
    assert caught.value.kind == "invalid"
    for word in words:
        assert word in f"{caught.value} {caught.value.hint}"
    assert run_files.all_of(layout.runs) == []


def test_check_reports_what_the_machine_offers_and_of_one_provider_nothing_else(run: Run) -> None:
    found = run("check")
    assert found["gateway"]["problem"] is None
    assert found["limits"]["memory_bytes"] > 0
    assert found["machine"]["uv"]["notes"][0].startswith("uv ")
    looks = ["uv", "open files", "memory cgroups", "kernel log", "disk"]
    assert list(found["machine"]) == looks
    assert all(one["problem"] or one["notes"] for one in found["machine"].values())
    assert list(run("check", provider="local")["providers"]) == ["local"]
    assert list(run("check", provider="slurm")["providers"]) == ["slurm"]
    with pytest.raises(EnvironmentsError, match="there is no provider 'none'"):
        run("check", provider="none")


def test_who_starts_replicas_is_left_without_children_or_descriptors(
    run: Run, layout: Layout
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    children = psutil.Process().children()
    run("launch", source="echo", replicas=2)
    run_files.stop_environment(layout.runs, "echo", 0.0)
    assert set(os.listdir("/proc/self/fd")) == before
    assert psutil.Process().children() == children


def test_a_stray_is_named_by_its_engines_id_which_leads_to_no_other_folder(run: Run) -> None:
    with pytest.raises(EnvironmentsError, match="no engine 'kubernetes'"):
        run("down_strays", strays=[{"provider": "kubernetes", "id": "rl/openenvd-echo-0-7f/a1-b2"}])
    for wrong in ("../run/echo", "rl/../echo", "/rl", "rl//echo", "rl/"):
        with pytest.raises(ValidationError, match="pattern"):
            run("down_strays", strays=[{"provider": "kubernetes", "id": wrong}])


# What keeps a machine from its best.

GOOD = (
    check.open_files(resource.RLIM_INFINITY, 10**6, 1),
    check.open_files(4096, 4096, 2),
    check.cgroups("", is_container=True),
    check.kernel_log(None, is_container=True),
    check.disk(Path("/h"), 2**31),
)


@pytest.mark.parametrize(
    ("check", "words", "command"),
    [
        (check.open_files(1024, 4096, 2), "1,536 sessions on 2 cores, and 4,096", "nofile"),
        (check.cgroups("read-only", is_container=False), "read-only", "systemd-run"),
        (check.cgroups("read-only", is_container=True), "read-only", "docker run"),
        (
            check.kernel_log(PermissionError(1, "not permitted"), is_container=False),
            "not permitted",
            "sysctl kernel.dmesg_restrict=0",
        ),
        (
            check.kernel_log(FileNotFoundError(2, "no such file"), is_container=True),
            "no such file",
            "--device /dev/kmsg",
        ),
        (check.disk(Path("/h"), 5 * 2**20), "5 MB are free in /h", "openenv prune"),
        *((one, None, None) for one in GOOD),
    ],
)
def test_what_is_missing_has_the_command_that_mends_it_and_what_is_there_a_note_alone(
    check: Check, words: str | None, command: str | None
) -> None:
    if words is None or command is None:
        assert (check.problem, check.remedy, len(check.notes)) == (None, None, 1)
    else:
        assert words in (check.problem or "")
        assert command in (check.remedy or "")


def test_operations_send_the_token_and_do_not_tell_it(
    run: Run, layout: Layout, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[dict[str, Any]] = []
    launched = run("launch", source="echo", token="auto", progress=told.append)["environment"]
    assert launched["has_token"]
    [replica] = run_files.all_of(layout.runs)
    token = replica.token
    assert token is not None
    base_url = base_url_by_name(layout.runs, "echo")
    assert without_token(base_url) == (launched["address"], token)
    with pytest.raises(NotAnswering, match="401"):
        ask(launched["address"], "/health", 10.0)
    measured = {"action": {"message": "x"}, "requests_grid": [4], "repetitions": 1}
    results = [
        run("probe", name="echo"),
        run("benchmark", name="echo", **measured),
        run("rollout", name="echo", out=str(tmp_path / "a"), episodes=2, max_steps=2),
        run("rollout", name=base_url, out=str(tmp_path / "b"), episodes=2, max_steps=2),
    ]
    assert [result["steps"] for result in results[2:]] == [4, 4]
    assert token not in json.dumps([launched, results, told])
    assert token not in "".join(capfd.readouterr())
    for path in (*layout.home.rglob("*"), *tmp_path.rglob("*")):
        if path.is_file() and token.encode() in path.read_bytes():
            assert path.name == "replica.json", path
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("options", "has_token"),
    [
        ({}, False),
        ({"token": "auto"}, True),
        ({"host": "127.0.0.2"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "my-box"}, True),
    ],
)
def test_beyond_loopback_there_is_always_a_token(options: dict[str, Any], has_token: bool) -> None:
    spec = EnvironmentSpec("x", "echo", **options).with_access()
    assert (spec.token is not None) is has_token
    assert spec.token != "auto"


def test_a_given_token_is_kept() -> None:
    spec = EnvironmentSpec("x", "echo", host="0.0.0.0", token="mine" * 4)
    assert spec.with_access().token == "mine" * 4
