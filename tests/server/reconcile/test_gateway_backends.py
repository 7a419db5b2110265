# SPDX-License-Identifier: Apache-2.0
"""What the gateway is told of an environment, by how its replicas are."""

import time
from dataclasses import replace
from typing import Any

import pytest

from openenvd.environments.gateway.configuration import MAX_ASKED, Backend, Endpoint, endpoints
from openenvd.requests_db.records import Environment
from openenvd.schema.states import EnvironmentState, ReplicaState
from openenvd.server.reconcile.gateway import backend_of

from .conftest import new_watch as watch


def environment(**spec: Any) -> Environment:
    now = time.time()
    return Environment("trial", {"gateway": True, **spec}, EnvironmentState.READY, now, now)


def test_replicas_get_sessions_when_ready_or_in_a_drain() -> None:
    watches = [watch(ordinal, state) for ordinal, state in enumerate(ReplicaState)]
    by_state = dict(zip(ReplicaState, watches, strict=True))
    found = backend_of(environment(), watches).endpoints
    ready, draining = by_state[ReplicaState.READY], by_state[ReplicaState.DRAINING]
    assert set(found) == {
        Endpoint(
            each.run_file.ordinal,
            "127.0.0.1",
            each.run_file.port,
            is_draining=each is draining,
            generation=each.run_file.request_id,
            replica=each.run_file.replica_id,
        )
        for each in (ready, draining)
    }
    [third] = backend_of(environment(), [watch(0, ReplicaState.READY, number=3)]).endpoints
    assert third.number == 3


@pytest.mark.parametrize(("replicas", "marked"), [(MAX_ASKED, set()), (MAX_ASKED + 1, {1})])
def test_full_replicas_are_marked_where_a_handshake_cannot_ask_all(
    replicas: int, marked: set[int]
) -> None:
    watches = [watch(ordinal, ReplicaState.READY) for ordinal in range(replicas)]
    for each in watches:
        each.status = {"sessions": 7 + (each is watches[1]), "capacity": {"max_sessions": 8}}
    watches[0].status = {"sessions": 0, "info": {"max_sessions": 4}}  # not used yet
    silent, held, starting = (watch(ordinal) for ordinal in (50, 51, 52))
    held.status = {"sessions": 8, "held": True, "capacity": {"max_sessions": 8}}
    starting.replica = replace(starting.replica, state=ReplicaState.STARTING)
    starting.status = {"sessions": 8, "capacity": {"max_sessions": 8}}
    assert backend_of(environment(), [*watches, silent, held, starting]).full == marked
    found = backend_of(environment(), watches)
    statuses = [each["health_status"] for each in lb_endpoints(found)]
    assert statuses == ["HEALTHY", "DEGRADED" if marked else "HEALTHY"] + ["HEALTHY"] * (
        replicas - 2
    )


def lb_endpoints(backend: Backend) -> list[dict[str, Any]]:
    [resource] = endpoints(backend)["resources"]
    found: list[dict[str, Any]] = resource["endpoints"][0]["lb_endpoints"]
    return found


def test_what_holds_requests_comes_last_and_the_token_is_the_run_files() -> None:
    backend = backend_of(environment(), [watch(0, ReplicaState.READY)], "/held.sock")
    [resource] = endpoints(backend)["resources"]
    first, last = resource["endpoints"]
    assert "priority" not in first
    assert (last["priority"], last["lb_endpoints"][0]["health_status"]) == (1, "DEGRADED")
    token = "a-token-of-letters"
    found = backend_of(environment(), [watch(0, ReplicaState.STARTING, token=token)])
    assert found.token == token


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({}, "/capacity"),
        ({"provider": "local"}, "/capacity"),
        ({"serve_as_is": True}, "/health"),
        ({"provider": "docker"}, "/health"),
    ],
)
def test_health_checks_ask_for_what_the_server_has(spec: dict[str, Any], path: str) -> None:
    assert backend_of(environment(**spec), []).health_path == path


@pytest.mark.parametrize(
    ("states", "token"),
    [
        ((ReplicaState.READY, ReplicaState.STARTING), None),  # an update that has just begun
        ((ReplicaState.READY, ReplicaState.READY), "new"),
        ((ReplicaState.DRAINING, ReplicaState.READY), "new"),
        ((ReplicaState.READY, ReplicaState.DRAINING), None),  # one that failed
    ],
)
def test_an_update_has_its_token_sent_from_when_its_replicas_serve(
    states: tuple[ReplicaState, ReplicaState], token: str | None
) -> None:
    old = watch(0, states[0], created_at=1.0)
    new = watch(1, states[1], created_at=2.0, token="new")
    assert backend_of(environment(), [old, new]).token == token


@pytest.mark.parametrize("spec", [{"token": "auto"}, {"host": "0.0.0.0"}])
def test_nothing_is_held_for_whoever_cannot_be_asked_for_the_token(spec: dict[str, Any]) -> None:
    assert backend_of(environment(**spec), [], "/held.sock").holding_socket is None
    known = watch(0, ReplicaState.STARTING, token="a-token-of-letters")
    assert backend_of(environment(**spec), [known], "/held.sock").holding_socket == "/held.sock"
