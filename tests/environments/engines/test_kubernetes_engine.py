# SPDX-License-Identifier: Apache-2.0
"""The engine's requests, against a mock of Kubernetes' API server.

The mock keeps objects and serves them; it has no scheduler and no nodes, judges nothing, and takes
no notice of selectors. It cannot show what Kubernetes really does with these requests.
"""

import itertools
import json
import os
from asyncio import to_thread
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import aiohttp.web
import kmock as mock
import pytest
import yaml

from openenvd.environments.engines import base
from openenvd.environments.engines.kubernetes.engine import KubernetesEngine
from openenvd.environments.engines.kubernetes.options import kubernetes_address

LABELS = base.Labels(home="0123456789ab", environment="echo", replica="echo-0-7f", generation="7f")
PLAN = base.ReplicaPlan(labels=LABELS, image="openenvd-echo:1", host="127.0.0.1", port=9000)
SECOND = replace(PLAN, labels=replace(LABELS, replica="echo-1-7f"))
REVIEWS = "post /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
ROOT = Path(__file__).parents[3]
NAME, SERVICE = "openenvd-echo-0-7f", "openenvd-echo-01234567"
PODS, SERVICES = "/api/v1/namespaces/rl/pods", "/api/v1/namespaces/rl/services"
RUNNING: Any = {
    "phase": "Running",
    "podIP": "10.1.2.3",
    "containerStatuses": [{"name": "openenvd", "state": {"running": {}}}],
}


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


async def started(engine: KubernetesEngine, plan: base.ReplicaPlan = PLAN) -> base.Instance:
    return await to_thread(engine.start, plan)


async def running(engine: KubernetesEngine, server: ApiServer) -> base.Instance:
    instance = await started(engine)
    set_status(server, RUNNING)
    return instance


async def state_of(engine: KubernetesEngine) -> base.InstanceState | None:
    found = await to_thread(engine.find, PLAN)
    return None if found is None else found.state


def service_of(server: ApiServer) -> Any:
    return server.objects[mock.resource("", "v1", "services"), "rl", SERVICE]


def made_secrets(server: ApiServer) -> list[Any]:
    sent = [request for request in list(server) if request.url.path.endswith("/secrets")]
    return [request.data for request in sent if request.method.value == "POST"]


async def test_the_next_pod_of_a_name_has_a_secret_that_does_not_go_with_the_last_ones(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    plan = replace(PLAN, env={"API_KEY": "hunter2"})
    instance = await started(engine, plan)
    set_status(kmock, {"phase": "Succeeded"})
    await to_thread(engine.remove, instance)
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


async def test_pods_are_put_into_the_namespace_that_is_asked_for_and_listed_there(
    engine: KubernetesEngine,
) -> None:
    plan = replace(PLAN, options={"namespace": "lab"})
    instance = await started(engine, plan)
    assert instance.id.startswith("lab/")
    assert [each.id for each in await to_thread(engine.list)] == [instance.id]


async def test_every_right_that_is_needed_is_asked_for(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    check = await to_thread(engine.check)
    assert check.problem is None
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


async def test_a_pods_end_is_overdue_by_the_clock_of_the_cluster(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    kmock.clock = datetime.now(UTC) - timedelta(hours=1)
    await running(engine, kmock)
    due = (kmock.clock + timedelta(seconds=30)).strftime("%Y-%m-%dT%H:%M:%SZ")
    pods = mock.resource("", "v1", "pods")
    kmock.objects[pods, "rl", NAME].patch({"metadata": {"deletionTimestamp": due}})
    assert await state_of(engine) is base.InstanceState.RUNNING
    kmock.clock += timedelta(seconds=60)
    assert await state_of(engine) is base.InstanceState.EXITED


async def test_a_pod_is_deleted_and_a_lost_stop_asked_again(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    instance = await running(engine, kmock)
    kmock.command_ends = NO_SHELL
    await to_thread(engine.stop, instance, 5.0)
    assert await state_of(engine) is None
    instance = await running(engine, kmock)
    kmock.command_ends = None
    with pytest.raises(base.EngineGone):
        await to_thread(engine.stop, instance, 60.0)
    assert await state_of(engine) is base.InstanceState.RUNNING
    await to_thread(engine.stop, instance, 0.0)
    assert await state_of(engine) is None


@pytest.mark.parametrize(
    ("ends", "error", "expected"),
    [
        (None, base.EngineGone, "was lost"),
        (ENDED_WITH_3, base.EngineRefused, "ended with code 3"),
        (NO_SHELL, base.EngineRefused, '"sh": executable file not found'),
    ],
    ids=["lost", "code 3", "no shell"],
)
async def test_a_signal_that_is_not_sent_is_told_with_how_its_command_ended(
    engine: KubernetesEngine,
    kmock: ApiServer,
    ends: str | None,
    error: type[Exception],
    expected: str,
) -> None:
    instance = await running(engine, kmock)
    await to_thread(engine.signal, instance, 15)
    kmock.command_ends = ends
    with pytest.raises(error, match=expected):
        await to_thread(engine.signal, instance, 15)


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        (403, base.EngineRefused, r"^Kubernetes [^{]*: not this one$"),
        (500, base.EngineGone, r"^Kubernetes [^{]*: not this one$"),
        (401, base.EngineGone, r"^Kubernetes [^{]*: not this one$"),
        (0, base.EngineGone, "."),  # its connection is cut, so that it is asked again
    ],
)
async def test_a_command_that_cannot_be_begun_says_why_in_kubernetes_words_alone(
    engine: KubernetesEngine, status: int, error: type[Exception], expected: str,
    kmock: ApiServer, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    instance = await running(engine, kmock)

    async def refuse(self: object, request: Any) -> aiohttp.web.StreamResponse:
        if not status:
            request._raw_request.transport.abort()
        return aiohttp.web.json_response({"message": "not this one"}, status=status or 200)

    monkeypatch.setattr(ApiServer, "_run_command", refuse)
    with pytest.raises(error, match=expected):
        await to_thread(engine.signal, instance, 10)


async def test_a_service_leads_to_the_newest_pod(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    await started(engine)
    service_of(kmock).delete()
    await started(engine)
    assert not service_of(kmock).deleted
    await started(engine, replace(SECOND, options={"port": "9001"}))
    service = service_of(kmock)
    assert [each["targetPort"] for each in service["spec"]["ports"]] == [9001]


async def test_a_service_that_goes_while_it_is_changed_is_made_again(
    engine: KubernetesEngine, kmock: ApiServer
) -> None:
    await started(engine)
    kmock[f"patch {SERVICES}/{SERVICE}"][:1] << NOT_THERE
    await started(engine, SECOND)
    asked = [request.method.value for request in list(kmock) if "/services" in request.url.path]
    assert asked == ["POST", "POST", "PATCH", "POST", "PATCH"]


@pytest.mark.parametrize("text", ["contexts: [", "clusters: 3", "a\n\tb: c", "[]", "\0", None])
async def test_a_kubeconfig_that_is_none_is_named(
    engine: KubernetesEngine, text: str | None
) -> None:
    path = Path(os.environ["KUBECONFIG"])
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(base.EngineGone) as gone:
        await to_thread(KubernetesEngine().check)
    assert str(path) in gone.value.message
    assert "\n" not in gone.value.message
    assert gone.value.hint is not None


@pytest.mark.parametrize(
    ("question", "answer", "error", "expected"),
    [
        (f"post {PODS}", QUOTA_EXCEEDED, base.EngineRefused, "exceeded quota: small"),
        (f"post {PODS}", QUOTA_CHANGED, base.EngineGone, "resourcequotas"),
        (f"get {PODS}/{NAME}", UNAVAILABLE, base.EngineGone, "."),
        (f"patch {SERVICES}/{SERVICE}", FORBIDDEN, base.EngineRefused, "cannot patch"),
    ],
    ids=["quota used up", "quota changed by others", "gone", "no right"],
)
async def test_a_start_that_kubernetes_refuses_or_does_not_answer_is_told_in_its_words(
    engine: KubernetesEngine, kmock: ApiServer, question: str, answer: Any,
    error: type[Exception], expected: str,
) -> None:  # fmt: skip
    if answer is FORBIDDEN:
        await started(engine)
    kmock[question] << answer
    with pytest.raises(error, match=expected):
        await started(engine, SECOND if answer is FORBIDDEN else PLAN)


async def test_a_right_that_is_missing_is_named_with_the_command_that_gives_it(
    engine: KubernetesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_may", lambda verb, resource, namespace: verb != "delete")
    check = await to_thread(engine.check)
    assert check.problem == "this account may not delete pods in rl"
    remedy = str(check.remedy)
    assert remedy.startswith("kubectl apply -n rl -f docs/openenvd-rbac.yaml")
    assert "pip download" in remedy  # for who has a wheel, which has no docs
