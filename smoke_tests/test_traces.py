# SPDX-License-Identifier: Apache-2.0
"""Traces of a real daemon's requests and rollouts, as a collector receives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Machine
from .otlp_receiver import Receiver
from .pages import name_of, pages_that_need, run_blocks

LAUNCH_SPANS = ("POST /v1/requests", "queue launch", "process launch", "dispatch", "run launch")


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def traced(machine: Machine, receiver: Receiver) -> Iterator[Machine]:
    """A machine whose daemon sends its traces to the receiver."""
    with receiver.taking():
        machine.environ |= receiver.variables
        yield machine
        machine.run("down", "--all")
        machine.run("stop")


@pytest.mark.parametrize("page", pages_that_need("a collector"), ids=name_of)
def test_the_blocks_of_a_page_that_need_a_collector_run(
    traced: Machine, receiver: Receiver, page: Path
) -> None:
    own = traced.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT")
    assert own in run_blocks(traced, page, "a collector", {"http://localhost:4318": own})
    for name in (*LAUNCH_SPANS, "starting"):
        receiver.wait_for(name)
    assert all(each["trace_id"] for each in traced.ok("requests", "--json").json["requests"])
