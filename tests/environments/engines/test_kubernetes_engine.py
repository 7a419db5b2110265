# SPDX-License-Identifier: Apache-2.0
"""The engine's requests, against a mock of Kubernetes' API server.

The mock keeps objects and serves them; it has no scheduler and no nodes, judges nothing, and takes
no notice of selectors. It cannot show what Kubernetes really does with these requests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp.web
import kmock as mock
import pytest
import yaml

from openenvd.environments.engines.base import (
    EngineGone,
    EngineRefused,
    InstanceState,
    Labels,
    NameTaken,
    ReplicaPlan,
)
from openenvd.environments.engines.kubernetes import engine as kubernetes
from openenvd.environments.engines.kubernetes.address import kubernetes_address
from openenvd.environments.engines.kubernetes.engine import KubernetesEngine

LABELS = Labels(home="0123456789ab", environment="echo", replica="echo-0-7f", generation="7f")
PLAN = ReplicaPlan(labels=LABELS, image="openenvd-echo:1", host="127.0.0.1", port=9000)
REVIEWS = "post /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
ROOT = Path(__file__).parents[3]
NAME = "openenvd-echo-0-7f"
RUNNING: Any = {
    "phase": "Running",
    "podIP": "10.1.2.3",
    "containerStatuses": [{"name": "openenvd", "state": {"running": {}}}],
}
LOG = (
    b"2026-05-04T10:00:00.000000001Z first\n2026-05-04T10:00:00.000000001Z second\n"
    b"2026-05-04T10:00:01.000000000Z \xff third"
)


class ApiServer(mock.KubernetesEmulator):
    """Gives objects what a real server would give them when they are made; runs commands."""

    _uids = itertools.count(1)
    clock: datetime | None = None  # None: it is right
    command_ends: str | None = '{"status": "Success"}'  # None: its connection is lost

    async def _handle(self, request: Any) -> aiohttp.web.StreamResponse:
        if request.url.path.endswith("/exec") and "Upgrade" in request.headers:
            return await self._run_command(request)
        if request.action == mock.action.CREATE and isinstance(request.data, dict):
            own = request.data.setdefault("metadata", {})
            own.setdefault("uid", f"u-{next(self._uids)}")
            own.setdefault("name", own["uid"])
            request.data.setdefault("status", {"phase": "Pending"})
        try:
            response = await super()._handle(request)
            if self.clock is not None and not response.prepared:
                response.headers["Date"] = format_datetime(self.clock, usegmt=True)
            return response
        except mock.KubernetesError as exc:
            if exc.reason == "Object Already Exists":  # the mock's own words
                raise ALREADY_THERE from exc
            raise

    async def _run_command(self, request: Any) -> aiohttp.web.StreamResponse:
        socket = aiohttp.web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request._raw_request)
        if self.command_ends is not None:
            await socket.send_bytes(b"\x03" + self.command_ends.encode())
        await socket.close()
        return socket


QUOTA_EXCEEDED = mock.KubernetesError(
    status=403, message='pods "openenvd-echo-0-7f" is forbidden: exceeded quota: small'
)
ALREADY_THERE = mock.KubernetesError(status=409, reason="AlreadyExists", message="it exists")
NOT_THERE = mock.KubernetesError(status=404, reason="NotFound", message="not found")
FORBIDDEN = mock.KubernetesError(
    status=403, reason="Forbidden", message='cannot patch resource "services"'
)
QUOTA_CHANGED = mock.KubernetesError(
    status=409, reason="Conflict", message='Operation cannot be fulfilled on resourcequotas "small"'
)
NO_SHELL = json.dumps(
    {
        "status": "Failure",
        "reason": "InternalError",
        "message": 'failed to exec in container: exec: "sh": executable file not found',
        "details": {"causes": [{"message": 'exec: "sh": executable file not found'}]},
    }
)
ENDED_WITH_3 = json.dumps(
    {
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": "command terminated with non-zero exit code",
        "details": {"causes": [{"reason": "ExitCode", "message": "3"}]},
    }
)
UNAVAILABLE = mock.KubernetesError(status=503)

pytestmark = pytest.mark.kmock(cls=ApiServer)


@pytest.fixture
async def engine(
    kmock: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KubernetesEngine]:
    """An engine with a mock of a cluster, in whose namespace `rl` it may do everything."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": str(kmock.url).rstrip("/")}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "rl"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    for name in ("OPENENVD_KUBE_CONTEXT", "OPENENVD_KUBE_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in kubernetes_address(os.environ).items():
        monkeypatch.setenv(name, value)
    kmock["get /version"] << {"gitVersion": "v1.34.4"}
    kmock[REVIEWS] << (lambda request: {"status": {"allowed": _is_allowed(request)}})
    for name in ("pods", "services", "secrets", "events"):
        kmock.resources[f"v1/{name}"] = mock.ResourceInfo()
    made = KubernetesEngine()
    yield made
    if (known := vars(made._cluster).get("_client")) is not None:
        known.client.rest_client.pool_manager.clear()


def _is_allowed(request: Any) -> bool:
    asked = request.data["spec"]["resourceAttributes"]
    return bool(asked["namespace"] == "rl")


def set_status(server: ApiServer, status: Any, name: str = NAME) -> None:
    pods = mock.resource("", "v1", "pods")
    server.objects[pods, "rl", name].patch({"status": status})


async def started(engine: KubernetesEngine, plan: ReplicaPlan = PLAN) -> Any:
    return await asyncio.to_thread(engine.start, plan)


async def test_a_pod_is_started_once_found_listed_and_removed(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    assert await asyncio.to_thread(engine.find, PLAN) is None
    instance = await started(engine)
    assert instance.state is InstanceState.STARTING
    assert instance.labels == LABELS
    assert (await started(engine)).id == instance.id
    set_status(kmock, RUNNING)
    found = await asyncio.to_thread(engine.find, PLAN)
    assert found is not None
    assert (found.state, found.address) == (InstanceState.RUNNING, "http://10.1.2.3:8000")
    assert [each.id for each in await asyncio.to_thread(engine.list)] == [instance.id]
    set_status(kmock, {"phase": "Succeeded"})
    await asyncio.to_thread(engine.remove, found)
    assert await asyncio.to_thread(engine.find, PLAN) is None
    await asyncio.to_thread(engine.remove, found)


async def test_an_environments_service_has_its_pods_as_owners(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    await started(engine)
    second = replace(PLAN, labels=replace(LABELS, replica="echo-1-7f"))
    await started(engine, second)
    services = mock.resource("", "v1", "services")
    service = kmock.objects[services, "rl", "openenvd-echo-01234567"]
    owners = service["metadata"]["ownerReferences"]
    assert [owner["name"] for owner in owners] == ["openenvd-echo-1-7f"]  # the mock does not merge


def made_secrets(server: ApiServer) -> list[Any]:
    """The Secrets that were asked for, in their order."""
    sent = [request for request in list(server) if request.url.path.endswith("/secrets")]
    return [request.data for request in sent if request.method.value == "POST"]


async def test_the_next_pod_of_a_name_has_a_secret_that_does_not_go_with_the_last_ones(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    plan = replace(PLAN, env={"API_KEY": "hunter2"})
    instance = await started(engine, plan)
    set_status(kmock, {"phase": "Succeeded"})
    await asyncio.to_thread(engine.remove, instance)
    again = await started(engine, plan)
    first, second = made_secrets(kmock)
    assert first["stringData"] == second["stringData"] == {"API_KEY": "hunter2"}
    uids = [each["metadata"]["ownerReferences"][0]["uid"] for each in (first, second)]
    assert uids == [each.id.rpartition("/")[2] for each in (instance, again)]
    assert first["metadata"]["name"] != second["metadata"]["name"]


async def test_a_pod_that_is_found_without_its_secret_is_given_it(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    plan = replace(PLAN, env={"API_KEY": "hunter2"})
    await started(engine, plan)
    [first] = made_secrets(kmock)
    name = first["metadata"]["name"]
    kmock.objects[mock.resource("", "v1", "secrets"), "rl", name].delete()
    await started(engine, plan)
    assert [each["metadata"]["name"] for each in made_secrets(kmock)] == [name, name]


async def test_every_request_says_who_asks(engine: KubernetesEngine, kmock: ApiServer) -> None:
    await started(engine)
    sent = {request.headers.get("Authorization") for request in list(kmock)}
    assert sent == {"Bearer secret"}


async def test_a_pod_of_others_has_the_name(engine: KubernetesEngine) -> None:
    await started(engine)
    other = replace(PLAN, labels=replace(LABELS, home="ffffffffffff"))
    with pytest.raises(NameTaken) as refused:
        await started(engine, other)
    assert refused.value.hint == f"kubectl delete pod -n rl {NAME}"


async def test_pods_are_put_into_the_namespace_that_is_asked_for_and_listed_there(
    engine: KubernetesEngine,
) -> None:
    plan = replace(PLAN, options={"namespace": "lab"})
    instance = await started(engine, plan)
    assert instance.id.startswith("lab/")
    assert [each.id for each in await asyncio.to_thread(engine.list)] == [instance.id]


async def test_an_image_that_cannot_be_had_is_an_exit(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    await started(engine)
    state = {"waiting": {"reason": "ErrImagePull", "message": "x:1: not found"}}
    set_status(
        kmock, {"phase": "Pending", "containerStatuses": [{"name": "openenvd", "state": state}]}
    )
    found = await asyncio.to_thread(engine.find, PLAN)
    assert found is not None
    assert found.exit is not None
    assert found.exit.error == "ErrImagePull: x:1: not found"


async def test_a_quota_that_is_used_up_refuses_a_pod_in_kubernetes_words(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    kmock["post /api/v1/namespaces/rl/pods"] << QUOTA_EXCEEDED
    with pytest.raises(EngineRefused, match="exceeded quota: small"):
        await started(engine)


async def test_what_is_printed_is_delivered_once_from_a_cursor_on(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    instance = await started(engine)
    set_status(kmock, {"phase": "Succeeded"})
    kmock[f"get /api/v1/namespaces/rl/pods/{NAME}/log"] << (lambda: LOG)
    chunks = await asyncio.to_thread(lambda: list(engine.logs(instance, None)))
    assert [chunk.data for chunk in chunks] == [b"first\n", b"second\n", b"\xff third"]
    rest = await asyncio.to_thread(lambda: list(engine.logs(instance, chunks[0].cursor)))
    assert [chunk.data for chunk in rest] == [b"second\n", b"\xff third"]
    asked = [request for request in list(kmock) if request.params.get("sinceTime")]
    assert asked[0].params["sinceTime"] == "2026-05-04T09:59:59Z"  # times may be out of order


async def test_changes_are_told_at_once_and_with_each_event(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    changes = engine.changes()
    await asyncio.to_thread(next, changes)
    waiting = asyncio.create_task(asyncio.to_thread(next, changes))
    await started(engine)
    await asyncio.wait_for(waiting, 30)


async def test_a_cluster_that_does_not_answer_is_gone(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    kmock["get /api/v1/namespaces/rl/pods"] << UNAVAILABLE
    with pytest.raises(EngineGone):
        await asyncio.to_thread(lambda: list(engine.list()))
    check = await asyncio.to_thread(engine.check)
    assert check.works
    assert check.version == "v1.34.4"


async def test_a_pod_that_waits_for_long_is_looked_at_less_and_less(
    engine: KubernetesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await started(engine)
    pauses: list[float] = []

    def note(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            raise EngineGone("enough")

    monkeypatch.setattr(engine, "_runs", lambda _: True)
    clock = SimpleNamespace(sleep=note, monotonic=time.monotonic)
    monkeypatch.setattr(kubernetes, "time", clock)
    with pytest.raises(EngineGone, match="enough"):
        await asyncio.to_thread(engine._await_end, instance, 600.0)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


async def test_every_right_that_is_needed_is_asked_for(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    check = await asyncio.to_thread(engine.check)
    assert check.works
    asked = [request.data["spec"]["resourceAttributes"] for request in list(kmock)[1:]]
    found = {(each["resource"], each["subresource"], each["verb"]) for each in asked}
    [role] = (
        each
        for each in yaml.safe_load_all((ROOT / "docs" / "openenvd-rbac.yaml").read_text())
        if each["kind"] == "Role"
    )
    given = {
        (*resource.partition("/")[::2], verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert found == given - {("events", "", "list")}  # done without


async def test_a_right_that_is_missing_is_named_with_the_command_that_gives_it(
    engine: KubernetesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_may", lambda verb, resource, namespace: verb != "delete")
    check = await asyncio.to_thread(engine.check)
    assert check.problem == "this account may not delete pods in rl"
    remedy = str(check.remedy)
    assert remedy.startswith("kubectl apply -n rl -f docs/openenvd-rbac.yaml")
    assert "pip download" in remedy  # for who has a wheel, which has no docs


async def test_a_pods_end_is_overdue_by_the_clock_of_the_cluster(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    kmock.clock = datetime.now(UTC) - timedelta(hours=1)
    await running(engine, kmock)
    due = (kmock.clock + timedelta(seconds=30)).strftime("%Y-%m-%dT%H:%M:%SZ")
    pods = mock.resource("", "v1", "pods")
    kmock.objects[pods, "rl", NAME].patch({"metadata": {"deletionTimestamp": due}})
    found = await asyncio.to_thread(engine.find, PLAN)
    assert found is not None
    assert found.state is InstanceState.RUNNING
    kmock.clock += timedelta(seconds=60)
    found = await asyncio.to_thread(engine.find, PLAN)
    assert found is not None
    assert found.state is InstanceState.EXITED


async def running(engine: KubernetesEngine, server: ApiServer) -> Any:
    instance = await started(engine)
    set_status(server, RUNNING)
    return instance


async def test_a_pod_without_a_shell_is_deleted_when_it_is_stopped(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    instance = await running(engine, kmock)
    kmock.command_ends = NO_SHELL
    with pytest.raises(EngineRefused, match='"sh": executable file not found'):
        await asyncio.to_thread(engine.signal, instance, 15)
    await asyncio.to_thread(engine.stop, instance, 5.0)
    assert await asyncio.to_thread(engine.find, PLAN) is None


async def test_a_stop_whose_connection_is_lost_is_asked_for_again_while_there_is_grace(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    instance = await running(engine, kmock)
    kmock.command_ends = None
    with pytest.raises(EngineGone):
        await asyncio.to_thread(engine.stop, instance, 60.0)
    found = await asyncio.to_thread(engine.find, PLAN)
    assert found is not None
    assert found.state is InstanceState.RUNNING
    await asyncio.to_thread(engine.stop, instance, 0.0)
    assert await asyncio.to_thread(engine.find, PLAN) is None


async def test_a_pod_that_does_not_run_yet_is_not_waited_for_when_it_is_stopped(
    engine: KubernetesEngine,
) -> None:
    instance = await started(engine)
    await asyncio.to_thread(engine.stop, instance, 600.0)
    assert await asyncio.to_thread(engine.find, PLAN) is None


async def test_a_server_that_does_not_stop_is_killed_in_its_pod_which_stays(
    engine: KubernetesEngine, kmock: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await running(engine, kmock)
    sent: list[int] = []
    run_command = ApiServer._run_command

    async def note(self: ApiServer, request: Any) -> aiohttp.web.StreamResponse:
        sent.append(int(request._raw_request.query.getall("command")[4]))
        if sent[-1] == signal.SIGKILL:
            set_status(kmock, {"phase": "Failed"})
        return await run_command(self, request)

    monkeypatch.setattr(ApiServer, "_run_command", note)
    await asyncio.to_thread(engine.stop, instance, 0.1)
    assert sent == [signal.SIGTERM, signal.SIGKILL]
    found = await asyncio.to_thread(engine.find, PLAN)
    assert found is not None
    assert found.state is InstanceState.EXITED


async def test_a_command_whose_connection_is_lost_has_no_answer(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    instance = await running(engine, kmock)
    kmock.command_ends = None
    with pytest.raises(EngineGone, match="was lost"):
        await asyncio.to_thread(engine.signal, instance, 15)


async def test_a_signal_that_is_not_sent_is_refused_with_the_code_of_its_command(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    instance = await running(engine, kmock)
    await asyncio.to_thread(engine.signal, instance, 15)
    kmock.command_ends = ENDED_WITH_3
    with pytest.raises(EngineRefused, match="ended with code 3"):
        await asyncio.to_thread(engine.signal, instance, 15)


@pytest.mark.parametrize(
    ("status", "error"), [(403, EngineRefused), (500, EngineGone), (401, EngineGone)]
)
async def test_a_command_that_cannot_be_begun_says_why_in_kubernetes_words_alone(
    engine: KubernetesEngine, status: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch,
    kmock: ApiServer,
) -> None:  # fmt: skip
    instance = await running(engine, kmock)

    async def refuse(self: object, request: object) -> aiohttp.web.StreamResponse:
        return aiohttp.web.json_response({"message": "not this one"}, status=status)

    monkeypatch.setattr(ApiServer, "_run_command", refuse)
    with pytest.raises(error, match=r"^Kubernetes [^{]*: not this one$"):
        await asyncio.to_thread(engine.signal, instance, 10)


async def test_a_command_is_asked_for_again_when_no_connection_to_the_cluster_is_made(
    engine: KubernetesEngine, kmock: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await running(engine, kmock)

    async def cut(self: object, request: Any) -> aiohttp.web.StreamResponse:
        request._raw_request.transport.abort()
        return aiohttp.web.Response()

    monkeypatch.setattr(ApiServer, "_run_command", cut)
    with pytest.raises(EngineGone):
        await asyncio.to_thread(engine.signal, instance, 10)


async def test_another_namespace_of_the_context_changes_nothing_about_what_runs(
    engine: KubernetesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in kubernetes_address(os.environ).items():
        monkeypatch.setenv(name, value)
    instance = await started(engine)
    path = Path(os.environ["KUBECONFIG"])
    path.write_text(path.read_text().replace("namespace: rl", "namespace: lab"))
    found = await asyncio.to_thread(engine.find, PLAN)
    assert found is not None
    assert found.id == instance.id
    assert (await started(engine)).id == instance.id


async def test_a_service_that_is_not_there_is_made_when_its_pod_is_found(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    services = mock.resource("", "v1", "services")
    await started(engine)
    kmock.objects[services, "rl", "openenvd-echo-01234567"].delete()
    await started(engine)
    assert not kmock.objects[services, "rl", "openenvd-echo-01234567"].deleted


async def test_a_service_leads_to_the_port_of_the_newest_pod(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    await started(engine)
    labels = replace(LABELS, replica="echo-1-7f")
    await started(engine, replace(PLAN, labels=labels, options={"port": "9001"}))
    services = mock.resource("", "v1", "services")
    service = kmock.objects[services, "rl", "openenvd-echo-01234567"]
    assert [each["targetPort"] for each in service["spec"]["ports"]] == [9001]


async def test_a_service_that_goes_while_it_is_changed_is_made_again(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    await started(engine)
    kmock["patch /api/v1/namespaces/rl/services/openenvd-echo-01234567"][:1] << NOT_THERE
    await started(engine, replace(PLAN, labels=replace(LABELS, replica="echo-1-7f")))
    asked = [request.method.value for request in list(kmock) if "/services" in request.url.path]
    assert asked == ["POST", "POST", "PATCH", "POST", "PATCH"]


async def test_an_account_that_may_not_change_a_service_is_told_so(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    await started(engine)
    kmock["patch /api/v1/namespaces/rl/services/openenvd-echo-01234567"] << FORBIDDEN
    with pytest.raises(EngineRefused, match="cannot patch"):
        await started(engine, replace(PLAN, labels=replace(LABELS, replica="echo-1-7f")))


async def test_a_quota_that_others_change_at_the_same_time_is_asked_for_again(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    kmock["post /api/v1/namespaces/rl/pods"] << QUOTA_CHANGED
    with pytest.raises(EngineGone, match="resourcequotas"):
        await started(engine)


@pytest.mark.parametrize("text", ["contexts: [", "clusters: 3", "a\n\tb: c", "[]", "\0"])
async def test_a_kubeconfig_that_is_none_is_named(engine: KubernetesEngine, text: str) -> None:
    Path(os.environ["KUBECONFIG"]).write_text(text)
    with pytest.raises(EngineGone) as gone:
        await asyncio.to_thread(engine.check)
    assert os.environ["KUBECONFIG"] in gone.value.message
    assert "\n" not in gone.value.message


async def test_a_kubeconfig_that_is_not_there_is_named(
    engine: KubernetesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    with pytest.raises(EngineGone, match="/nowhere/config") as gone:
        await asyncio.to_thread(KubernetesEngine().check)
    assert gone.value.hint is not None
