# SPDX-License-Identifier: Apache-2.0
"""The operations there are, and what the daemon and a worker need to know of each."""

import pkgutil
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from openenvd.environments.gateway.process import HOST_VARIABLE
from openenvd.server.operations import registry
from openenvd.server.operations.base import Operation
from openenvd.server.operations.launch import LaunchPayload

all_operations = pytest.mark.parametrize(
    "operation", registry.OPERATIONS.values(), ids=lambda o: o.name
)


def test_each_operation_is_long_or_short_and_has_an_expectation() -> None:
    schedules = {operation.name: operation.schedule for operation in registry.OPERATIONS.values()}
    for name in ("launch", "scale", "restart", "build_image", "benchmark", "test", "rollout"):
        assert schedules.pop(name) == "LONG"
    assert set(schedules) == {"down", "down_strays", "check", "probe", "prune"}
    assert set(schedules.values()) == {"SHORT"}
    assert set(registry.expected_bytes()) == {"LONG", "SHORT"}
    assert min(registry.expected_bytes().values()) > 0


@all_operations
def test_an_operation_is_found_by_name_with_its_fields(operation: type[Operation]) -> None:
    assert registry.OPERATIONS[operation.name] is operation
    dotted = registry.dotted_name(operation)
    assert callable(pkgutil.resolve_name(dotted)) if "run" in vars(operation) else not dotted
    for name, field in operation.Payload.model_fields.items():
        assert field.description, name
    with pytest.raises(ValidationError, match="nonsense"):
        operation.Payload.model_validate({"nonsense": 1})


def test_the_zygotes_preloads_import_nothing_heavy() -> None:
    heavy = "fastapi uvicorn sqlalchemy httpx rich yaml asyncio"
    code = f"""
import importlib, sys
for name in {list(registry.PRELOAD)!r}:
    importlib.import_module(name)
print(*(set({heavy!r}.split()) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ["source"]),
        ({"source": ""}, ["source"]),
        ({"source": "echo", "replicas": 0}, ["replicas"]),
        ({"source": "echo", "max_sessions": 0}, ["max_sessions"]),
        ({"source": "echo", "port": 70000}, ["port"]),
        ({"source": "echo", "provider": "nowhere"}, ["there is no provider 'nowhere'", "local"]),
        ({"source": "echo", "env": {"A=B": "x"}}, ["A=B"]),
        ({"source": "echo", "env": {"A": "x\0"}}, ["environment variable"]),
        ({"source": "echo", "cwd": "relative"}, ["not an absolute path"]),
        ({"source": "echo", "ready_timeout_seconds": 0}, ["ready_timeout_seconds"]),
        ({"source": "echo", "shards": 0}, ["shards"]),
        ({"source": "echo", "admission_timeout_seconds": -1}, ["admission_timeout_seconds"]),
        ({"source": "echo", "session_memory_mb": 64, "isolate": False}, ["isolate is false"]),
        ({"source": "echo", "shards": 2, "serve_as_is": True}, ["no shards"]),
        ({"source": "echo", "session_memory_mb": 64, "serve_as_is": True}, ["one process"]),
        ({"source": "echo", "cpus": 2, "sandbox": True}, ["cpus, sandbox: for engines alone"]),
        ({"source": "docker://echo", "engine_options": ["x"]}, ["not written NAME=VALUE"]),
        ({"source": "echo", "token": "short"}, ["token", "16 to 256"]),
        ({"source": "echo", "token": "with/a/slash/and/more"}, ["token"]),
        ({"source": "echo", "allow_origin": ["lab.example"]}, ["is not an origin"]),
        ({"source": "echo", "allow_origin": ["*"]}, ["is not an origin"]),
        ({"source": "echo", "with_packages": ["--index-url=x"]}, ["is not a package"]),
        ({"source": "echo", "with_packages": ["a\nb"]}, ["is not a package"]),
        ({"source": "echo", "gateway": True, "port": 21500}, ["--gateway-port"]),
        (
            {"source": "docker://echo", "idle_timeout_seconds": 9},
            ["idle_timeout_seconds", "sleeps on this machine alone"],
        ),
        (
            {"source": "echo", "gateway": True, "min_replicas": 0, "max_replicas": 2},
            ["min_replicas", "without the gateway"],
        ),
        (
            {"source": "echo", "provider": "slurm", "min_replicas": 0, "max_replicas": 2},
            ["min_replicas", "sleeps on this machine alone"],
        ),
        ({"source": "echo", "gateway": True, "host": "0.0.0.0"}, ["--gateway-host"]),
        (
            {"source": "echo", "min_replicas": 5, "max_replicas": 3},
            ["min_replicas: 5 is more than max_replicas,"],
        ),
        (
            {"source": "echo", "replicas": 4, "max_replicas": 3},
            ["replicas: 4 is more than max_replicas, which is 3"],
        ),
        ({"source": "echo", "min_replicas": 2}, ["it scales itself only with a max_replicas"]),
        ({"source": "echo", "min_replicas": 0}, ["it scales itself only with a max_replicas"]),
        (
            {"source": "echo", "idle_timeout_seconds": 1, "replicas": 2},
            ["several replicas do not sleep; set max_replicas, so that they can scale down to"],
        ),
        (
            {"source": "echo", "idle_timeout_seconds": 1, "serve_as_is": True},
            ["run as it is"],
        ),
        (
            {"source": "echo", "idle_timeout_seconds": 1, "min_replicas": 1, "max_replicas": 2},
            ["min_replicas: an environment that sleeps has no minimum; leave out 1"],
        ),
    ],
)
def test_a_launch_that_makes_no_sense_is_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        LaunchPayload.model_validate(fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("operation", "fields", "told"),
    [
        ("scale", {"replicas": 0}, "0 replicas would serve nobody; `openenv down` stops it"),
        ("scale", {"replicas": 1001}, "less than or equal to 1000"),
        ("restart", {"max_surge": 0}, "nothing could be replaced"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(
    operation: str, fields: dict[str, int], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        registry.OPERATIONS[operation].Payload.model_validate({"name": "echo", **fields})


def test_an_environment_behind_the_gateway_is_reached_at_the_gateways_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(HOST_VARIABLE, "0.0.0.0")  # the daemon's setting
    payload = LaunchPayload.model_validate({"source": "echo", "gateway": True})
    assert payload.spec().with_access().token is not None
    assert LaunchPayload.model_validate(payload.model_dump()) == payload  # in the worker


@pytest.mark.parametrize(
    ("provider", "options", "needed"),
    [
        ("local", {"replicas": 1}, False),
        ("local", {"replicas": 8}, False),
        ("docker", {"replicas": 1}, False),
        ("docker", {"replicas": 2}, True),
        ("docker", {"max_replicas": 1}, False),
        ("docker", {"max_replicas": 2}, True),
        ("kubernetes", {"replicas": 1}, True),
    ],
)
def test_several_replicas_of_an_engine_or_those_that_move_need_the_gateway(
    provider: str, options: dict[str, int], needed: bool
) -> None:
    payload = LaunchPayload.model_validate({"source": "echo", "provider": provider, **options})
    assert payload.gateway is needed
