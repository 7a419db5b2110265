# SPDX-License-Identifier: Apache-2.0
"""What the engine reports of pods on a real node of Kubernetes."""

import signal
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from openenvd.environments.engines.base import InstanceState, Labels, ReplicaPlan
from openenvd.environments.engines.kubernetes.engine import KubernetesEngine
from openenvd.schema.spec import DEFAULT_BASE

from ..conftest import eventually
from ..engines.test_docker_engine import reached
from .cluster import Cluster

SERVE = "import time\nprint('up', flush=True)\ntime.sleep(600)"


@pytest.fixture
def engine(real: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesEngine]:
    monkeypatch.setenv("KUBECONFIG", str(real.kubeconfig))
    made = KubernetesEngine()
    yield made
    for instance in made.list():
        made.remove(instance)


def plan_of(
    program: str = SERVE, memory_bytes: int | None = None, image: str = DEFAULT_BASE
) -> ReplicaPlan:
    labels = Labels("0123456789ab", "echo", f"echo-0-{uuid.uuid4().hex[:8]}", "7f")
    patch = '{"spec": {"terminationGracePeriodSeconds": 2}}'
    return ReplicaPlan(
        labels=labels,
        image=image,
        command=("python3", "-c", program),
        host="127.0.0.1",
        port=0,
        memory_bytes=memory_bytes,
        options={"patch": patch},
    )


def test_a_signal_that_a_server_does_not_know_does_not_end_it(engine: KubernetesEngine) -> None:
    plan = plan_of()
    engine.start(plan)
    instance = reached(engine, plan, InstanceState.RUNNING)
    engine.signal(instance, signal.SIGUSR1)
    assert engine.find(plan) == instance


def test_a_secret_reaches_its_pod_and_goes_with_it(engine: KubernetesEngine, real: Cluster) -> None:
    program = "import os; print(os.environ['API_KEY'], os.environ['TEXT'])"
    plan = replace(plan_of(program), env={"API_KEY": "$(hunter2)", "TEXT": "$(x) $$"})
    instance = engine.start(plan)
    ended = reached(engine, plan, InstanceState.EXITED)
    assert b"".join(chunk.data for chunk in engine.logs(ended, None)) == b"$(hunter2) $(x) $$\n"
    assert "hunter2" not in real.kubectl("get", "pods", "-o", "json")
    engine.remove(instance)
    eventually(lambda: real.kubectl("get", "secrets", "-o", "name") == "", within=60)
