# SPDX-License-Identifier: Apache-2.0
"""The homes of the tests of environments, and operations as a worker calls them."""

from __future__ import annotations

import json
import pkgutil
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenvd.server.operations import registry

from ...environments.conftest import home as home
from ...environments.conftest import layout as layout

LAUNCH_ID, CHANGE_ID = secrets.token_hex(8), secrets.token_hex(8)  # name cgroups, which all share

Run = Callable[..., Any]


@pytest.fixture
def run(home: Path) -> Run:
    """`run("scale", name="echo", replicas=2)`, as a worker does it."""

    def call(
        operation: str,
        *,
        progress: Any = lambda _: None,
        request_id: str = CHANGE_ID,
        **payload: Any,
    ) -> Any:
        function = pkgutil.resolve_name(registry.dotted_name(registry.by_name(operation)))
        request_id = LAUNCH_ID if operation == "launch" else request_id
        return json.loads(json.dumps(function(payload, request_id, str(home), progress)))

    return call
