# SPDX-License-Identifier: Apache-2.0
"""Makes a replica's pod and Secret, and its environment's service; reads options; finds clusters.

The functions are pure, except that the name of a Secret is random. Secret variables of a replica
(the token, and values that `system/text/safe_text.py` hides) are in the Secret, which users who may
see pods need not see. Each pod has a Secret of its own, whose new name is in the pod's annotations.

What has no option is set by `patch`, a JSON merge patch (RFC 7386) of the whole pod.

The containers of a pod share one process namespace. So the image's process is not the first one in
it, which would ignore SIGTERM, and orphans are reaped. The server is the process without a parent
in the namespace that has the same mounts as the shell that looks for it; other containers of the
pod, which a mesh adds, have other mounts. Those of another user's process are hidden: it is taken
for the server only if no process has the same mounts.

The cluster is found as `kubectl` finds it, without its library:

    KUBECONFIG ▶ ~/.kube/config, where there is one ▶ the cluster that this process runs in

The context that is current at a launch, and its namespace, stay those of its replicas:
`kubectl config use-context` and `set-context` change nothing about them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ....schema.protocol import CONTAINER_PORT, HOST_OPTIONS_VARIABLE
from ....system.text.json_lines import Json
from ....system.text.safe_text import is_secret
from .. import base
from ..host_options import name_within, read_object, read_options, read_pairs, served_anywhere

CONTAINER = "openenvd"
GPU = "nvidia.com/gpu"
GRACE_SECONDS = 30  # for sessions to end when Kubernetes itself takes a pod away
SECRET_ANNOTATION = "openenvd.secret"  # noqa: S105  a name
PROBE_SECONDS = 2
_LABEL = re.compile("[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DNS_LABEL = re.compile("[a-z]([a-z0-9-]*[a-z0-9])?")
_NAMESPACE = re.compile("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SECRET_KEY = re.compile("[A-Za-z0-9._-]+")
_LABELS = dict.fromkeys(base.LABELS, "")
_FOUND_BY: Json = {
    "kind": "Pod",
    "metadata": {"name": "", "namespace": "", "labels": _LABELS, "annotations": _LABELS},
}
_AWAY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
# A pod there is given up after these seconds.
_TOLERATED: Json = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 10}
_SANDBOX: Json = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_FIND_SERVER = r"""
main= kind=
for p in /proc/[0-9]*; do
  p=${p#/proc/}
  [ "$p" -gt 1 ] && [ "$p" != $$ ] || continue
  k=own
  if ! [ "/proc/$p/ns/mnt" -ef /proc/self/ns/mnt ]; then
    [ ! -e "/proc/$p/ns/mnt" ] && [ "$kind" != own ] || continue
    k=hidden
  fi
  parent= mask=0
  while read -r key value _; do
    case $key in PPid:) parent=$value ;; SigCgt:) mask=$value ;; esac
  done 2>/dev/null <"/proc/$p/status"
  [ "$parent" = 0 ] || continue
  if [ "$kind" != "$k" ] || [ "$p" -lt "$main" ]; then main=$p kind=$k caught=$mask; fi
done
[ -n "$main" ] || exit 0
"""
# $1: a signal's number; $2: its bit in the mask of handled signals, if it must be handled, or 0.
SIGNAL_SERVER = f"""{_FIND_SERVER}
[ "$2" = 0 ] || [ $((0x$caught & $2)) != 0 ] || exit 0
kill -"$1" "$main"
"""
# The server drains, while the service does not lead to this pod any more.
_DRAIN_SERVER = f"""{_FIND_SERVER}
[ $((0x$caught & 0x200)) != 0 ] || exit 0
kill -USR1 "$main"
while kill -0 "$main" 2>/dev/null; do sleep 1; done
"""


def options_of(options: Mapping[str, str], *, sandbox: bool = False) -> Json:
    """Return the values of a pod's options, by name; raises `EngineRefused`."""
    found = read_options("kubernetes", options, _OPTIONS)
    if sandbox and "spec" in found.get("patch", {}):
        text = "--engine-option patch of a pod's spec could take back what --sandbox drops"
        raise base.EngineRefused(text, "leave one of them out")
    return found


def pod_of(plan: base.ReplicaPlan, namespace: str) -> Json:
    """Return the pod of a replica; raises `EngineRefused` for an invalid option."""
    options = options_of(plan.options)
    annotations = plan.labels.to_labels()  # which may have characters that labels may not
    if _hidden(plan):
        annotations[SECRET_ANNOTATION] = f"{dns_name(plan.name)}-{secrets.token_hex(4)}"
    spec: Json = {
        "restartPolicy": "Never",  # the daemon decides that
        "shareProcessNamespace": True,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": options.get("grace", GRACE_SECONDS),
        "tolerations": [{"key": key, **_TOLERATED} for key in _AWAY],
        "containers": [_container(plan, options, annotations.get(SECRET_ANNOTATION))],
    }
    if plan.sandbox:
        spec["volumes"] = [{"name": "tmp", "emptyDir": {}}]
    for name, key in _OF_POD.items():
        if name in options:
            spec[key] = options[name]
    metadata = {
        "name": dns_name(plan.name),
        "namespace": namespace,
        "labels": label_values(plan.labels),
        "annotations": annotations,
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    patched: Json = _merged(pod, options.get("patch", {}))
    return patched


def _container(plan: base.ReplicaPlan, options: Json, secret: str | None) -> Json:
    port = port_of(plan)
    drain = {"exec": {"command": ["sh", "-c", _DRAIN_SERVER]}}
    host = {"name": "Host", "value": "127.0.0.1"}
    health = {"path": "/health", "port": port, "httpHeaders": [host]}
    container: Json = {
        "name": CONTAINER,
        "image": plan.image,
        "env": [_variable(secret, *item) for item in served_anywhere(plan.env).items()],
        "ports": [{"containerPort": port}],
        "resources": _resources(plan, options),
        "readinessProbe": {"httpGet": health, "periodSeconds": PROBE_SECONDS},
        "lifecycle": {"preStop": drain},
        "imagePullPolicy": options.get("image-pull-policy", "IfNotPresent"),
    }
    if plan.command:
        container["args"] = [_unexpanded(word) for word in plan.command]
    if plan.sandbox:
        container["securityContext"] = _SANDBOX
        container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108  inside
    return container


def _variable(secret: str | None, name: str, value: str) -> Json:
    if not _is_hidden(name, value):
        return {"name": name, "value": _unexpanded(value)}
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}


def _hidden(plan: base.ReplicaPlan) -> dict[str, str]:
    """Return the variables that belong into the Secret."""
    items = served_anywhere(plan.env).items()
    return {name: value for name, value in items if _is_hidden(name, value)}


def _is_hidden(name: str, value: str) -> bool:
    if name == HOST_OPTIONS_VARIABLE:
        return json.loads(value).get("token") is not None
    return is_secret(name, value) and _SECRET_KEY.fullmatch(name) is not None


def _unexpanded(text: str) -> str:
    """Return a text with `$` doubled, since Kubernetes replaces `$(NAME)` by a variable."""
    return text.replace("$", "$$")


def port_of(plan: base.ReplicaPlan) -> int:
    """Return the port that the server listens on."""
    return int(options_of(plan.options).get("port", CONTAINER_PORT))


def _resources(plan: base.ReplicaPlan, options: Json) -> Json:
    limits: Json = {}
    if plan.memory_bytes:
        limits["memory"] = str(plan.memory_bytes)
    if plan.cpus:
        limits["cpu"] = f"{int(plan.cpus * 1000)}m"
    if plan.gpus:
        limits[options.get("gpu-resource", GPU)] = str(plan.gpus)
    # By default, Kubernetes takes the limits.
    asked = {name: options.get(f"{name}-request") for name in ("cpu", "memory")}
    return {"limits": limits, "requests": {name: text for name, text in asked.items() if text}}


def service_of(plan: base.ReplicaPlan, pod: Json) -> Json:
    """Return the service of a replica's environment, which is removed with its last pod."""
    labels = label_values(plan.labels)
    shared = {key: labels[key] for key in (base.HOME_LABEL, base.ENVIRONMENT_LABEL)}
    # Another home's service for an environment of the same name has another name.
    name = dns_name(f"openenvd-{plan.labels.environment}-{plan.labels.home[:8]}")
    ports = [{"port": CONTAINER_PORT, "targetPort": port_of(plan)}]
    spec = {"spec": {"selector": shared, "ports": ports}}
    return {"apiVersion": "v1", "kind": "Service", **_owned(pod, name, shared), **spec}


def secret_of(plan: base.ReplicaPlan, pod: Json) -> Json | None:
    """Return the Secret of a replica, which is removed with its pod; None if nothing is secret."""
    if not (found := _hidden(plan)):
        return None
    name = pod["metadata"]["annotations"][SECRET_ANNOTATION]
    owned = _owned(pod, name, label_values(plan.labels))
    return {"apiVersion": "v1", "kind": "Secret", **owned, "stringData": found}


def _owned(pod: Json, name: str, labels: dict[str, str]) -> Json:
    """Return the metadata of an object that is removed with its pods."""
    own = pod["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": own["name"], "uid": own["uid"]}
    where = {"name": name, "namespace": own["namespace"]}
    return {"metadata": {**where, "labels": labels, "ownerReferences": [owner]}}


def dns_name(text: str) -> str:
    """Return a name for an object, a DNS label, which is always the same for the same text."""
    return name_within(text, _DNS_LABEL, re.sub("[^a-z0-9]+", "-", text.lower()))


def label_values(labels: base.Labels) -> dict[str, str]:
    """Return an instance's labels with values that Kubernetes accepts."""
    return {
        name: name_within(text, _LABEL, re.sub("[^A-Za-z0-9_.-]", "-", text).lstrip("_.-"))
        for name, text in labels.to_labels().items()
    }


def _merged(value: Any, patch: Any) -> Any:
    """Return a value with a JSON merge patch applied."""
    if not isinstance(patch, dict):
        return patch
    kept = dict(value) if isinstance(value, dict) else {}
    for key, item in patch.items():
        if item is None:
            kept.pop(key, None)
        else:
            kept[key] = _merged(kept.get(key), item)
    return kept


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("write a whole number")
    return int(text)


def _namespace(text: str) -> str:
    """Read a namespace, which becomes a part of paths; the API server checks all other names."""
    if not _NAMESPACE.fullmatch(text):
        raise ValueError("write at most 63 letters a-z, digits and '-'")
    return text


def _patch(text: str) -> Json:
    found = read_object(text)
    patched = _merged(_FOUND_BY, found)
    if _merged(patched, _FOUND_BY) != patched:
        raise ValueError("a pod is found by its name, its namespace and the labels openenvd.*")
    return found


_OF_POD = {
    "image-pull-secret": "imagePullSecrets",
    "node-selector": "nodeSelector",
    "priority-class": "priorityClassName",
    "runtime-class": "runtimeClassName",
    "service-account": "serviceAccountName",
}
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "cpu-request": str,
    "gpu-resource": str,
    "grace": _number,
    "image-pull-policy": str,
    "image-pull-secret": lambda text: [{"name": each.strip()} for each in text.split(",")],
    "memory-request": str,
    "namespace": _namespace,
    "node-selector": read_pairs,
    "patch": _patch,
    "port": _number,
    "priority-class": str,
    "runtime-class": str,
    "service-account": str,
}


KUBECONFIG = "KUBECONFIG"
CONTEXT = "OPENENVD_KUBE_CONTEXT"
NAMESPACE = "OPENENVD_KUBE_NAMESPACE"
IN_CLUSTER = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")


def kubernetes_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that lead to the cluster that `kubectl` would use."""
    usual = Path(environ.get("HOME") or "~", ".kube", "config").expanduser()
    given = environ.get(KUBECONFIG, "")
    if not given and not usual.exists() and environ.get(IN_CLUSTER[0]):
        return {KUBECONFIG: "", **{name: environ.get(name, "") for name in IN_CLUSTER}}
    files = given or str(usual)
    current = next((each["current-context"] for each in _read(files, "current-context")), "")
    context = environ.get(CONTEXT) or str(current)
    namespace = environ.get(NAMESPACE) or _namespace_of(files, context)
    return {KUBECONFIG: files, CONTEXT: context, NAMESPACE: namespace}


def _namespace_of(files: str, context: str) -> str:
    """Return a context's namespace, of the first file that has the context; empty: none has."""
    for found in _read(files, "contexts"):
        for each in found["contexts"]:
            if isinstance(each, dict) and each.get("name") == context:
                namespace = (each.get("context") or {}).get("namespace")
                return str(namespace or "default")
    return ""


def _read(files: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield the contents of those files that can be read and have the key."""
    import yaml  # here: a daemon without a cluster need not hold it

    for path in filter(None, files.split(os.pathsep)):
        try:
            found = yaml.safe_load(Path(path).read_bytes())
        except (OSError, yaml.YAMLError):
            continue
        if isinstance(found, dict) and found.get(key):
            yield found


ENGINE = base.EngineEntry(
    "openenvd.environments.engines.kubernetes.engine:KubernetesEngine",
    base.Preparation.PULLED_IMAGE,
    extra="kubernetes",
    address=kubernetes_address,
    check_options=options_of,
    has_own_addresses=True,
    moves=True,
)
