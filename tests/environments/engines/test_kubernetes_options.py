# SPDX-License-Identifier: Apache-2.0
"""What Kubernetes is asked for, which cluster is asked, and what pods say of themselves."""

import json
import re
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments.engines import base
from openenvd.environments.engines.kubernetes.options import (
    SIGNAL_SERVER,
    dns_name,
    kubernetes_address,
    label_values,
    options_of,
    pod_of,
    secret_of,
    service_of,
)
from openenvd.environments.engines.kubernetes.pods import instance_of
from openenvd.schema.protocol import HOST_OPTIONS_VARIABLE

LABELS = base.Labels(home="0123456789ab", environment="echo", replica="echo-0-7f", generation="7f")
PLAN = base.ReplicaPlan(labels=LABELS, image="openenvd-echo:1", host="127.0.0.1", port=9000)


def pod(plan: base.ReplicaPlan = PLAN, **options: str) -> Any:
    names = {name.replace("_", "-"): text for name, text in options.items()}
    return pod_of(replace(plan, options=names), "rl")


def container(plan: base.ReplicaPlan = PLAN, **options: str) -> Any:
    [found] = pod(plan, **options)["spec"]["containers"]
    return found


def test_a_pod_has_no_rights_its_limits_gpus_and_a_check_of_health() -> None:
    wanted = {"restartPolicy": "Never", "automountServiceAccountToken": False}
    assert pod()["spec"].items() >= (wanted | {"shareProcessNamespace": True}).items()
    plan = replace(PLAN, memory_bytes=512 * 2**20, cpus=1.5, gpus=2)
    limits = {"memory": "536870912", "cpu": "1500m"}
    assert container(plan)["resources"] == {
        "limits": {**limits, "nvidia.com/gpu": "2"},
        "requests": {},
    }
    share = container(plan, gpu_resource="nvidia.com/mig-1g.5gb", memory_request="100Mi")
    assert share["resources"] == {
        "limits": {**limits, "nvidia.com/mig-1g.5gb": "2"},
        "requests": {"memory": "100Mi"},
    }
    probe = container(port="9001")["readinessProbe"]["httpGet"]
    assert (probe["path"], probe["port"]) == ("/health", 9001)
    assert probe["httpHeaders"] == [{"name": "Host", "value": "127.0.0.1"}]


def test_variables_stay_as_they_are_and_a_server_may_be_called_by_its_pods_address() -> None:
    plan = replace(PLAN, env={HOST_OPTIONS_VARIABLE: '{"cores": 2}', "A": "1"})
    env = {each["name"]: each["value"] for each in container(plan)["env"]}
    assert json.loads(env[HOST_OPTIONS_VARIABLE]) == {"cores": 2, "host": "0.0.0.0"}
    assert env["A"] == "1"
    made = container(replace(PLAN, env={"A": "$(B) $$ $C"}, command=("sh", "-c", "$(D)")))
    assert made["env"][0] == {"name": "A", "value": "$$(B) $$$$ $$C"}
    assert made["args"] == ["sh", "-c", "$$(D)"]


def test_the_token_and_values_that_look_secret_are_in_a_secret_of_the_pod() -> None:
    env = {HOST_OPTIONS_VARIABLE: '{"token": "hunter2"}', "API_KEY": "$(x)", "A": "1"}
    plan = replace(PLAN, env=env)
    made = pod(plan)
    assert "hunter2" not in json.dumps(made)
    made["metadata"]["uid"] = "u-1"
    secret = secret_of(plan, made)
    assert secret is not None
    key = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "API_KEY"}}
    assert {"name": "API_KEY", "valueFrom": key} in made["spec"]["containers"][0]["env"]
    assert [owner["uid"] for owner in secret["metadata"]["ownerReferences"]] == ["u-1"]
    assert json.loads(secret["stringData"].pop(HOST_OPTIONS_VARIABLE))["token"] == "hunter2"
    assert secret["stringData"] == {"API_KEY": "$(x)"}
    assert secret_of(replace(PLAN, env={"A": "1"}), made) is None


def test_options_and_a_patch_become_parts_of_the_pod() -> None:
    made = pod(
        node_selector="disk=ssd,zone=a",
        image_pull_secret="one,two",
        priority_class="low",
        patch='{"spec": {"hostNetwork": true, "tolerations": null}}',
    )["spec"]
    assert made["nodeSelector"] == {"disk": "ssd", "zone": "a"}
    assert made["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    assert made["priorityClassName"] == "low"
    assert made["hostNetwork"] is True
    assert "tolerations" not in made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"namespcae": "rl"}, "has no option 'namespcae'.*did you mean namespace?"),
        ({"namespace": "R L"}, "namespace=R L"),
        ({"patch": "[]"}, "must be a JSON object"),
        ({"patch": "{"}, "must be a JSON object"),
        ({"patch": '{"kind": "Job"}'}, "a pod is found by its name"),
        ({"patch": '{"metadata": null}'}, "a pod is found by its name"),
        ({"patch": '{"metadata": {"namespace": "kube-system"}}'}, "a pod is found by its name"),
        ({"patch": '{"metadata": {"labels": {"openenvd.home": "x"}}}'}, "found by its name"),
        ({"patch": '{"metadata": {"annotations": null}}'}, "a pod is found by its name"),
        ({"grace": "soon"}, "a whole number"),
        ({"node-selector": "ssd"}, "NAME=VALUE"),
        ({"node-selector": "gpu,zone=a"}, "'gpu' has no value"),
        ({"namespace": "1/../x y"}, "namespace=1/../x y"),
        ({"namespace": "a.b"}, "namespace=a.b"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_started(
    options: dict[str, str], words: str
) -> None:
    with pytest.raises(base.EngineRefused) as refusal:
        options_of(options, sandbox=False)
    assert re.search(words, f"{refusal.value.message} {refusal.value.hint}")


def test_a_patch_cannot_open_a_sandbox_but_may_add_labels() -> None:
    patch = '{"spec": {"hostPID": true}}'
    with pytest.raises(base.EngineRefused, match="take back what --sandbox drops"):
        options_of({"patch": patch}, sandbox=True)
    added = pod(replace(PLAN, sandbox=True), patch='{"metadata": {"labels": {"team": "rl"}}}')
    assert added["metadata"]["labels"]["team"] == "rl"


def test_names_and_labels_that_kubernetes_does_not_take_stay_apart_and_are_kept_whole() -> None:
    names = ["echo", "Echo", "e_cho", "e.cho", "9echo", "echo-" + "x" * 90, "echo-" + "x" * 91]
    found = [dns_name(name) for name in names]
    assert found[0] == "echo"
    assert len(set(found)) == len(names)
    assert all(len(name) <= 63 for name in found)
    labels = replace(LABELS, environment="_my_env.", replica="r" * 80)
    made = pod(replace(PLAN, labels=labels))["metadata"]
    assert base.Labels.of(made["annotations"]) == labels
    assert all(0 < len(value) <= 63 for value in made["labels"].values())
    assert made["labels"]["openenvd.home"] == LABELS.home


def test_a_service_leads_to_all_replicas_of_one_homes_environment() -> None:
    made = {"metadata": {"namespace": "rl", "name": "openenvd-echo-0-7f", "uid": "u-1"}}
    service = service_of(PLAN, made)
    values = label_values(LABELS)
    assert service["spec"]["selector"] == {
        "openenvd.home": values["openenvd.home"],
        "openenvd.environment": "echo",
    }
    assert [owner["uid"] for owner in service["metadata"]["ownerReferences"]] == ["u-1"]
    other = service_of(replace(PLAN, labels=replace(LABELS, home="ba9876543210")), made)
    names = [each["metadata"]["name"] for each in (service, other)]
    assert names == ["openenvd-echo-01234567", "openenvd-echo-ba987654"]


def test_a_signal_is_sent_to_the_first_process_that_has_the_shells_files(tmp_path: Path) -> None:
    def process(pid: str, files: str | None, parent: int = 0) -> None:
        (tmp_path / pid / "ns").mkdir(parents=True)
        (tmp_path / pid / "status").write_text(f"PPid:\t{parent}\nSigCgt:\t0000000000000200\n")
        if files is not None:
            (tmp_path / files).touch()
            (tmp_path / pid / "ns" / "mnt").symlink_to(tmp_path / files)

    def signalled() -> str:
        script = f"kill() {{ echo $*; }}\n{SIGNAL_SERVER}".replace("/proc", str(tmp_path))
        command = ["sh", "-c", script, "sh", "10", "512"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    process("self", "own")
    process("1", "pause")
    process("7", "mesh")
    assert signalled() == ""
    process("9000008", None)  # another user's
    assert signalled() == "-10 9000008"
    process("9000012", "own", parent=9000020)
    process("9000020", "own")
    process("9000030", "own")
    assert signalled() == "-10 9000020"


def test_the_cluster_is_that_of_kubectl_and_its_context_is_kept(tmp_path: Path) -> None:
    usual = tmp_path / ".kube" / "config"
    in_cluster = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    home = {"HOME": str(tmp_path)}
    inside = kubernetes_address(home | in_cluster)
    assert inside == {"KUBECONFIG": "", **in_cluster}
    usual.parent.mkdir()
    contexts = "contexts: [{name: lab, context: {namespace: rl}}, {name: cloud, context: {}}]\n"
    usual.write_text(f"current-context: lab\n{contexts}")
    outside = kubernetes_address(home | in_cluster)
    assert outside == {
        "KUBECONFIG": str(usual),
        "OPENENVD_KUBE_CONTEXT": "lab",
        "OPENENVD_KUBE_NAMESPACE": "rl",
    }
    usual.write_text(f"current-context: cloud\n{contexts.replace('rl', 'other')}")
    assert kubernetes_address(home)["OPENENVD_KUBE_NAMESPACE"] == "default"
    assert kubernetes_address(outside) == outside
    assert kubernetes_address(inside) == inside


NOW = datetime(2026, 5, 4, 10, 0, tzinfo=UTC)
PLACES = "0/3 nodes are available: 3 Insufficient memory."


def seen(phase: str, state: Any = None, node: str | None = "n1", **status: Any) -> Any:
    statuses = [] if state is None else [{"name": "openenvd", "state": state}]
    return {
        "metadata": {
            "name": "openenvd-echo-0-7f",
            "namespace": "rl",
            "uid": "u-1",
            "annotations": LABELS.to_labels(),
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": "openenvd", "ports": [{"containerPort": 8000}]}],
        },
        "status": {"phase": phase, "containerStatuses": statuses, **status},
    }


def waiting(reason: str, message: str = "") -> Any:
    return seen("Pending", {"waiting": {"reason": reason, "message": message}})


def ended(code: int, reason: str = "Error", **more: Any) -> Any:
    return seen("Failed", {"terminated": {"exitCode": code, "reason": reason, **more}})


UNSCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "U", "message": PLACES}
CREATING = "node n1 makes its container"
FAILED_MOUNT = "FailedMount: no volume x"


@pytest.mark.parametrize(
    ("pod", "warning", "words", "is_on_its_way"),
    [
        (seen("Pending", node=None, conditions=[UNSCHEDULED]), "", PLACES, False),
        (waiting("ContainerCreating"), "", CREATING, True),
        (waiting("PodInitializing"), "", CREATING, True),
        (waiting("ContainerCreating"), FAILED_MOUNT, f"{CREATING}; {FAILED_MOUNT}", False),
        (waiting("ImagePullBackOff", "i/o timeout"), "", "ImagePullBackOff: i/o timeout", False),
    ],
)
def test_what_a_pod_waits_for_is_said(
    pod: Any, warning: str, words: str, is_on_its_way: bool
) -> None:
    found = instance_of(pod, NOW, *([warning] if warning else []))
    assert (found.state, found.waiting) == (base.InstanceState.STARTING, words)
    assert found.is_on_its_way is is_on_its_way


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ErrImagePull", "docker.io/library/nothing:1: not found"),
        ("ImagePullBackOff", "pull access denied, repository does not exist"),
        ("ErrImageNeverPull", "Container image is not present with pull policy of Never"),
        ("InvalidImageName", "couldn't parse image name"),
    ],
)
def test_an_image_that_cannot_be_had_is_the_end(reason: str, message: str) -> None:
    found = instance_of(waiting(reason, message), NOW)
    assert found.state is base.InstanceState.EXITED
    assert found.exit == base.ExitFacts(error=f"{reason}: {message}")


def test_a_container_that_others_put_into_the_pod_and_that_crashes_is_told() -> None:
    last = {"terminated": {"exitCode": 1, "message": "no route to the mesh"}}
    sidecar = {
        "name": "mesh",
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}},
        "lastState": last,
    }
    found = instance_of(seen("Pending", initContainerStatuses=[sidecar]), NOW)
    assert found.waiting == (
        "CrashLoopBackOff: back-off 5m0s; mesh ended with code 1: no route to the mesh"
    )


@pytest.mark.parametrize(
    ("ip", "address"), [("10.1.2.3", "http://10.1.2.3:8000"), ("fd00::7", "http://[fd00::7]:8000")]
)
def test_a_pod_that_runs_is_reached_at_its_own_address(ip: str, address: str) -> None:
    found = instance_of(seen("Running", {"running": {}}, podIP=ip), NOW)
    assert (found.state, found.address) == (base.InstanceState.RUNNING, address)


TIMES = {"startedAt": "2026-05-04T09:00:00Z", "finishedAt": "2026-05-04T09:00:07Z"}
EVICTED = {"reason": "Evicted", "message": "The node was low on resource: memory."}


@pytest.mark.parametrize(
    ("pod", "facts"),
    [
        (ended(3, **TIMES), base.ExitFacts(exit_code=3, seconds=7.0)),
        (
            ended(128, "StartError", message="no serve"),
            base.ExitFacts(error="StartError: no serve"),
        ),
        (
            seen("Failed", startTime="t", podIP="10.1.2.3", **EVICTED),
            base.ExitFacts(evidence="Evicted: The node was low on resource: memory."),
        ),
    ],
)
def test_an_exit_has_its_code_and_seconds_or_its_reason(pod: Any, facts: base.ExitFacts) -> None:
    found = instance_of(pod, NOW)
    assert (found.state, found.exit) == (base.InstanceState.EXITED, facts)


@pytest.mark.parametrize(("code", "is_oom"), [(137, True), (1, True), (0, False), (143, False)])
def test_memory_is_what_ended_it_only_if_it_did_not_end_well(code: int, is_oom: bool) -> None:
    found = instance_of(ended(code, "OOMKilled"), NOW)
    assert found.exit is not None
    assert found.exit.is_oom is is_oom


@pytest.mark.parametrize(
    ("code", "reason", "conditions", "exit_"),
    [
        (0, "Completed", [], base.ExitFacts(ended_by="pod x-1 was deleted: not by openenvd")),
        (
            143,
            "Error",
            [{"type": "DisruptionTarget", "status": "True", "message": "node n1 is drained"}],
            base.ExitFacts(ended_by="pod x-1 was deleted: node n1 is drained"),
        ),
        (3, "Error", [], base.ExitFacts(exit_code=3)),
        (
            137,
            "OOMKilled",
            [],
            base.ExitFacts(exit_code=137, is_oom=True, evidence="pod x-1, OOMKilled"),
        ),
    ],
    ids=["ended in order", "drained", "crashed", "out of memory"],
)
def test_a_pod_that_ends_since_it_is_deleted_says_so(
    code: int, reason: str, conditions: list[Any], exit_: base.ExitFacts
) -> None:
    gone = ended(code, reason)
    gone["metadata"] |= {"deletionTimestamp": NOW.isoformat(), "name": "x-1"}
    gone["status"]["conditions"] = conditions
    assert instance_of(gone, NOW).exit == exit_


def test_a_pod_whose_node_is_away_is_lost_once_its_end_is_overdue() -> None:
    gone = seen("Running", {"running": {}}, podIP="10.1.2.3")
    due = NOW - timedelta(seconds=5)
    gone["metadata"]["deletionTimestamp"] = due.isoformat().replace("+00:00", "Z")
    assert instance_of(gone, NOW).state is base.InstanceState.RUNNING
    later = instance_of(gone, NOW + timedelta(seconds=11))
    assert later.state is base.InstanceState.EXITED
    assert later.exit == base.ExitFacts(evidence="node n1 does not answer")


@pytest.mark.parametrize(
    ("containers", "reason", "is_lost"),
    [("True", None, True), ("False", None, False), ("True", "ReadinessGatesNotReady", False)],
)
def test_a_node_that_is_away_is_not_given_the_grace_of_its_pods(
    containers: str, reason: str | None, is_lost: bool
) -> None:
    conditions = [
        {"type": "Ready", "status": "False", "reason": reason},
        {"type": "ContainersReady", "status": containers},
    ]
    gone = seen("Running", {"running": {}}, podIP="10.1.2.3", conditions=conditions)
    asked = NOW - timedelta(seconds=20)
    due = asked + timedelta(seconds=3600)
    gone["metadata"] |= {"deletionTimestamp": due.isoformat(), "deletionGracePeriodSeconds": 3600}
    found = instance_of(gone, NOW)
    assert (found.state is base.InstanceState.EXITED) is is_lost
