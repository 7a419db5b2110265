# SPDX-License-Identifier: Apache-2.0
"""The homes of the tests of environments, and operations as a worker calls them."""

import json
import pkgutil
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments import run_files
from openenvd.environments.engines.providers import provider_named
from openenvd.environments.shim.client import Fork
from openenvd.environments.sources.program import prepared_from_json
from openenvd.schema.layout import Layout
from openenvd.schema.spec import EnvironmentSpec
from openenvd.server.operations import registry

from ...environments.conftest import Started
from ...environments.conftest import home as home
from ...environments.conftest import layout as layout
from ...environments.shim.conftest import fork as fork

LAUNCH_ID, CHANGE_ID = secrets.token_hex(8), secrets.token_hex(8)  # name cgroups, which all share

Run = Callable[..., Any]


def started(launch: dict[str, Any], home: Path, fork: Fork) -> dict[str, Any]:
    spec, address = EnvironmentSpec(**launch["spec"]), launch["address"]
    prepared = prepared_from_json(launch["prepared"])
    provider = provider_named(spec.provider, home, fork)
    known = {"count": spec.replicas, "launch_id": LAUNCH_ID, "address": address}
    replicas = Started(provider.start(spec, prepared, **known))
    try:
        told = {"name": spec.name, "address": replicas.address, "replicas": replicas.wait()}
    except BaseException:
        replicas.stop()
        raise
    return {"environment": told | {"has_token": spec.token is not None}}


@pytest.fixture
def run(home: Path, layout: Layout, fork: Fork) -> Iterator[Run]:
    """`run("scale", name="echo", replicas=2)`, as a worker does it; nothing runs afterwards."""

    def call(
        operation: str,
        *,
        progress: Any = lambda _: None,
        request_id: str = CHANGE_ID,
        **payload: Any,
    ) -> Any:
        function = pkgutil.resolve_name(registry.dotted_name(registry.OPERATIONS[operation]))
        request_id = LAUNCH_ID if operation == "launch" else request_id
        result = json.loads(json.dumps(function(payload, request_id, str(home), progress)))
        return started(result, home, fork) if operation == "launch" else result

    yield call
    for name in {run_file.environment for run_file in run_files.all_of(layout.runs)}:
        run_files.stop_environment(layout.runs, name, 0.0)
