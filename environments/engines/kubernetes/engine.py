# SPDX-License-Identifier: Apache-2.0
"""Kubernetes: a pod for each replica, and a service for each environment.

    agent ──JSON──▶ API server ──▶ pod openenvd-<replica>       restartPolicy: Never
                                     readiness: GET /health      preStop: SIGUSR1, and wait
                                   Secret openenvd-<replica>-…  owned by its pod
                                   service openenvd-<environment>-<home>   owned by its pods

There is no Deployment or StatefulSet: the daemon itself replaces and scales pods, and a second
controller would work against it (decision 0027). A pod that ends stays, with its exit and its log,
until the daemon starts the next one.

The daemon and the gateway call a pod at its own address. Other clients in the cluster use the
service, which leads to the pods that are ready, and is removed with the last of them.

Kubernetes sends no signals, so a command in the pod does (`sh`, `kill`). If the image has no shell,
or the node is not reached within the grace of a stop, the pod is deleted, and its log ends there.

    engine.py   the engine; api.py: its requests
    options.py  turns plans into pods and services; reads a replica's options; finds the cluster
    pods.py     reads the status of pods

Failure cases

    a pod cannot be placed     it is STARTING, and its status has the scheduler's message
    its image is missing       EXITED, with the registry's message, if that is final; otherwise the
                               pod keeps waiting
    its node is away           Kubernetes deletes the pod, which counts as lost soon after that.
                               `remove` needs no node: one that comes back ends what it still runs
    it is evicted, preempted   preStop drains it; then it has EXITED, as the pod's status says
    the next pod of a replica  it has a Secret of its own, because the old one may be collected
                               later; before Kubernetes 1.34 even if another pod owns it by then
    several namespaces         the pods of each are listed once a second; they are not watched
"""

from __future__ import annotations

import contextlib
import signal as signals
import time
from collections.abc import Iterable, Iterator

from ....system.text.json_lines import Json
from .. import base
from ..instance_logs import lines_of, pieces_after, since_of
from .api import ROLE_IS_IN, ApiRefused, Cluster, InConflict, NotThere
from .options import CONTAINER, SIGNAL_SERVER, dns_name, options_of, pod_of, secret_of, service_of
from .pods import id_of, instance_of, is_being_made, labels_of

CORE = "/api/v1"
WATCH_SECONDS = 10  # after which pods are listed again: one that is overdue makes no event
POLL_SECONDS = 0.5  # between two looks at one pod
OWNING_ATTEMPTS = 3  # to create or change an object that is removed with its last pod meanwhile
KILLED_SECONDS = 10.0  # for its node to report that a server was killed
KILL_SECONDS = 30.0  # for Kubernetes to end a pod that it kills
_DRAIN_SIGNALS = (signals.SIGUSR1, signals.SIGUSR2)  # which end a server that has no handler
_NEEDED = (  # in the namespace of the replicas: the role in docs/openenvd-rbac.yaml
    *((verb, "pods") for verb in ("get", "list", "watch", "create", "delete")),
    ("get", "pods/log"),
    ("get", "pods/exec"),  # some versions of Kubernetes check this verb, others the next
    ("create", "pods/exec"),
    ("create", "services"),
    ("patch", "services"),
    ("create", "secrets"),
    ("patch", "secrets"),
)
_OPEN = "every pod can reach replicas: launch with --token auto, or write a NetworkPolicy"


class KubernetesEngine:
    """Runs replicas as pods."""

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._namespaces: set[str] = set()  # of replicas, and the default one

    def check(self) -> base.Check:
        version = str(self._cluster.get("/version")["gitVersion"])
        namespace = self._cluster.namespace
        for verb, resource in _NEEDED:
            if not self._may(verb, resource, namespace):
                problem = f"this account may not {verb} {resource} in {namespace}"
                apply = f"kubectl apply -n {namespace} -f docs/openenvd-rbac.yaml, of {ROLE_IS_IN}"
                return base.Check(version=version, problem=problem, remedy=apply)
        return base.Check(version=version, notes=(_OPEN,))

    def list(self) -> Iterable[base.Instance]:
        query = {"labelSelector": base.HOME_LABEL}
        pods = [p for path in self._scopes() for p in self._cluster.get(path, **query)["items"]]
        now = self._cluster.now()
        return [instance_of(pod, now) for pod in pods if labels_of(pod) is not None]

    def find(self, plan: base.ReplicaPlan) -> base.Instance | None:
        pod = self._find_pod(plan)
        return None if pod is None else self._instance(pod)

    def start(self, plan: base.ReplicaPlan) -> base.Instance:
        """Create a pod, its Secret, and its environment's service unless there is one."""
        pod = self._find_pod(plan) or self._create(plan)
        found = self._instance(pod)
        if found.state is not base.InstanceState.EXITED:
            try:
                self._make_owned(plan, pod)  # also for a pod that a killed agent has left
            except base.EngineRefused:
                self.remove(found)
                raise
        return found

    def signal(self, instance: base.Instance, number: int) -> None:
        """Send a signal by a command in the pod; SIGUSR1 only to a server that handles it."""
        found = self._seen(instance)
        if found is None or found.state is not base.InstanceState.RUNNING:
            return
        mask = 1 << (number - 1) if number in _DRAIN_SIGNALS else 0
        command = ["sh", "-c", SIGNAL_SERVER, "sh", str(int(number)), str(mask)]
        namespace, name, _ = instance.id.split("/")
        code = None
        with contextlib.suppress(NotThere):
            code = self._cluster.run(namespace, name, CONTAINER, command)
        if code != 0 and self._runs(instance):
            raise base.EngineRefused(f"no signal was sent: its command ended with code {code}")

    def stop(self, instance: base.Instance, grace_seconds: float) -> None:
        """Stop the server in a pod, which stays; if that fails, delete the pod.

        While grace is left, a lost connection raises `EngineGone`, and the agent tries again.
        """
        deadline = time.monotonic() + grace_seconds
        steps = ((signals.SIGTERM, grace_seconds), (signals.SIGKILL, KILLED_SECONDS))
        try:
            for number, seconds in steps:
                found = self._seen(instance)
                if found is None or found.state is base.InstanceState.EXITED:
                    return
                if found.state is base.InstanceState.STARTING:  # it has no server yet
                    break
                self.signal(instance, number)
                self._await_end(instance, seconds)
        except base.EngineRefused:  # the image has no shell: Kubernetes ends the pod
            pass
        except base.EngineGone:
            if time.monotonic() < deadline:
                raise
        if self._runs(instance):
            left = max(1, int(deadline - time.monotonic()))
            self._delete(instance, left)
            self._await_end(instance, left + KILL_SECONDS)

    def remove(self, instance: base.Instance) -> None:
        """Delete a pod; its environment's service is removed with the last pod."""
        pod = self._pod_of(instance)
        if pod is None:
            return
        if labels_of(pod) != instance.labels:
            raise base.EngineRefused(f"the pod {instance.id} belongs to another")
        if self._runs(instance):
            self._delete(instance, 1)
            self._await_end(instance, KILL_SECONDS)
        self._delete(instance, 0)  # without its node, which may be away

    def changes(self) -> Iterator[None]:
        while True:
            scopes = self._scopes()
            newest = self._cluster.get(scopes[0], labelSelector=base.HOME_LABEL, limit="1")
            yield None
            if len(scopes) > 1:
                time.sleep(1.0)
                continue
            query = {
                "watch": "true",
                "labelSelector": base.HOME_LABEL,
                "resourceVersion": str(newest["metadata"]["resourceVersion"]),
                "timeoutSeconds": str(WATCH_SECONDS),
            }
            with self._cluster.stream(scopes[0], query, WATCH_SECONDS * 2) as pieces:
                for _ in pieces:
                    yield None

    def logs(self, instance: base.Instance, cursor: str | None) -> Iterator[base.LogChunk]:
        namespace, name, _ = instance.id.split("/")
        query = {"container": CONTAINER, "follow": "true", "timestamps": "true"}
        if (since := since_of(cursor)) is not None:
            query["sinceTime"] = since.isoformat().replace("+00:00", "Z")
        try:
            with self._cluster.stream(_path(namespace, "pods", name, "log"), query) as pieces:
                # The kubelet's own lines have no time.
                lines = (line for line in lines_of(pieces) if line[:1].isdigit())
                yield from pieces_after(lines, cursor)
        except ApiRefused:
            if self._runs(instance):
                raise
            return  # the pod never ran, or has been removed
        if self._runs(instance):
            raise base.EngineGone("Kubernetes has ended its stream of a pod's output")

    def _namespace(self, plan: base.ReplicaPlan) -> str:
        namespace = options_of(plan.options).get("namespace") or self._cluster.namespace
        self._namespaces.add(namespace)
        return str(namespace)

    def _scopes(self) -> tuple[str, ...]:
        """Return the paths of all pods that may be ours."""
        self._namespaces.add(self._cluster.namespace)
        return tuple(_path(namespace, "pods") for namespace in sorted(self._namespaces))

    def _may(self, verb: str, resource: str, namespace: str) -> bool:
        """Return whether this account may use a verb in a namespace."""
        resource, _, part = resource.partition("/")
        wanted = {"verb": verb, "resource": resource, "namespace": namespace, "subresource": part}
        group = "authorization.k8s.io/v1"
        asked: Json = {"apiVersion": group, "kind": "SelfSubjectAccessReview"}
        asked["spec"] = {"resourceAttributes": wanted}
        review = self._cluster.post(f"/apis/{group}/selfsubjectaccessreviews", asked)
        return bool(review["status"]["allowed"])

    def _pod(self, namespace: str, name: str) -> Json | None:
        with contextlib.suppress(NotThere):
            return self._cluster.get(_path(namespace, "pods", name))
        return None

    def _pod_of(self, instance: base.Instance) -> Json | None:
        """Return the pod of an instance; None when it is gone, or another pod has its name."""
        namespace, name, _ = instance.id.split("/")
        pod = self._pod(namespace, name)
        return pod if pod is not None and id_of(pod) == instance.id else None

    def _instance(self, pod: Json) -> base.Instance:
        warning = self._warning(pod) if is_being_made(pod) else None
        return instance_of(pod, self._cluster.now(), warning)

    def _seen(self, instance: base.Instance) -> base.Instance | None:
        pod = self._pod_of(instance)
        return None if pod is None else instance_of(pod, self._cluster.now())

    def _runs(self, instance: base.Instance) -> bool:
        """Return whether the pod of an instance is there, and has not ended."""
        found = self._seen(instance)
        return found is not None and found.state is not base.InstanceState.EXITED

    def _warning(self, pod: Json) -> str | None:
        """Return the newest warning about a pod, such as a missing volume."""
        selector = f"involvedObject.uid={pod['metadata']['uid']},type=Warning"
        path = _path(pod["metadata"]["namespace"], "events")
        try:
            found = self._cluster.get(path, fieldSelector=selector)["items"]
        except ApiRefused:
            return None
        events = [each for each in found if each.get("reason") not in ("Failed", "BackOff")]
        newest = max(events, key=lambda each: str(each.get("lastTimestamp") or ""), default=None)
        return None if newest is None else f"{newest['reason']}: {newest['message']}"

    def _find_pod(self, plan: base.ReplicaPlan) -> Json | None:
        pod = self._pod(self._namespace(plan), dns_name(plan.name))
        if pod is not None and labels_of(pod) != plan.labels:
            own = pod["metadata"]
            command = f"kubectl delete pod -n {own['namespace']} {own['name']}"
            raise base.NameTaken(f"another pod has the name {own['name']}", command)
        return pod

    def _create(self, plan: base.ReplicaPlan) -> Json:
        """Create a pod, or find the one that another thread or agent has created meanwhile."""
        namespace = self._namespace(plan)
        with contextlib.suppress(InConflict):
            return self._cluster.post(_path(namespace, "pods"), pod_of(plan, namespace))
        return base.require(self._find_pod(plan), plan)

    def _make_owned(self, plan: base.ReplicaPlan, pod: Json) -> None:
        """Make a pod's Secret, for which it waits, and its environment's service."""
        namespace = pod["metadata"]["namespace"]
        if (secret := secret_of(plan, pod)) is not None:
            self._own(_path(namespace, "secrets"), secret, {"stringData": secret["stringData"]})
        service = service_of(plan, pod)
        ports = {"ports": service["spec"]["ports"]}  # merged by the service's own port
        self._own(_path(namespace, "services"), service, {"spec": ports})

    def _own(self, folder: str, wanted: Json, changes: Json) -> None:
        """Create an object, or merge `changes` and a further owner into the one that is there."""
        own = wanted["metadata"]
        owners = {"ownerReferences": own["ownerReferences"]}  # merged by their ids
        for _ in range(OWNING_ATTEMPTS):
            with contextlib.suppress(InConflict):
                self._cluster.post(folder, wanted)
                return
            with contextlib.suppress(NotThere):  # it was removed meanwhile, with its last pod
                self._cluster.merge(f"{folder}/{own['name']}", {"metadata": owners, **changes})
                return
        raise base.EngineGone(f"{wanted['kind']} {own['name']} is removed each time it is made")

    def _delete(self, instance: base.Instance, grace_seconds: int) -> None:
        namespace, name, uid = instance.id.split("/")
        asked = {"gracePeriodSeconds": grace_seconds, "preconditions": {"uid": uid}}
        asked |= {"apiVersion": "v1", "kind": "DeleteOptions"}
        self._cluster.delete(_path(namespace, "pods", name), asked)

    def _await_end(self, instance: base.Instance, seconds: float) -> None:
        base.wait_until(lambda: not self._runs(instance), seconds, POLL_SECONDS)


def _path(namespace: str, *parts: str) -> str:
    return "/".join((CORE, "namespaces", namespace, *parts))
