# SPDX-License-Identifier: Apache-2.0
"""What Kubernetes is asked for, and which cluster is asked."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments.engines.base import EngineRefused, Labels, ReplicaPlan
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
from openenvd.schema.protocol import HOST_OPTIONS_VARIABLE

LABELS = Labels(home="0123456789ab", environment="echo", replica="echo-0-7f", generation="7f")
PLAN = ReplicaPlan(labels=LABELS, image="openenvd-echo:1", host="127.0.0.1", port=9000)


def pod(plan: ReplicaPlan = PLAN, **options: str) -> Any:
    names = {name.replace("_", "-"): text for name, text in options.items()}
    return pod_of(replace(plan, options=names), "rl")


def container(plan: ReplicaPlan = PLAN, **options: str) -> Any:
    [found] = pod(plan, **options)["spec"]["containers"]
    return found


def test_a_pod_is_never_restarted_by_kubernetes_and_gets_no_rights_in_it() -> None:
    spec = pod()["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["shareProcessNamespace"] is True


def test_a_pod_has_its_limits_and_its_gpus() -> None:
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


def test_a_pod_is_asked_for_its_health_by_a_name_that_every_server_may_be_called_by() -> None:
    probe = container(port="9001")["readinessProbe"]["httpGet"]
    assert (probe["path"], probe["port"]) == ("/health", 9001)
    assert probe["httpHeaders"] == [{"name": "Host", "value": "127.0.0.1"}]


def test_a_server_in_a_pod_may_be_called_by_the_pods_address() -> None:
    plan = replace(PLAN, env={HOST_OPTIONS_VARIABLE: '{"cores": 2}', "A": "1"})
    env = {each["name"]: each["value"] for each in container(plan)["env"]}
    assert json.loads(env[HOST_OPTIONS_VARIABLE]) == {"cores": 2, "host": "0.0.0.0"}
    assert env["A"] == "1"


def test_what_kubernetes_would_put_a_variable_in_place_of_is_left_as_it_is() -> None:
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
        ({"patch": "[]"}, "write an object"),
        ({"patch": "{"}, "no JSON"),
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
        ({"image-pull-secret": "a,,b"}, "image-pull-secret=a,,b"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_started(
    options: dict[str, str], words: str
) -> None:
    with pytest.raises(EngineRefused) as refusal:
        options_of(options, sandbox=False)
    assert re.search(words, f"{refusal.value.message} {refusal.value.hint}")


def test_a_patch_cannot_open_a_sandbox_but_may_add_labels() -> None:
    patch = '{"spec": {"hostPID": true}}'
    with pytest.raises(EngineRefused, match="take back what --sandbox drops"):
        options_of({"patch": patch}, sandbox=True)
    added = pod(replace(PLAN, sandbox=True), patch='{"metadata": {"labels": {"team": "rl"}}}')
    assert added["metadata"]["labels"]["team"] == "rl"


def test_names_that_kubernetes_does_not_take_get_others_that_stay_apart() -> None:
    names = ["echo", "Echo", "e_cho", "e.cho", "9echo", "echo-" + "x" * 90, "echo-" + "x" * 91]
    found = [dns_name(name) for name in names]
    assert found[0] == "echo"
    assert len(set(found)) == len(names)
    assert all(len(name) <= 63 for name in found)


def test_labels_that_kubernetes_does_not_take_are_kept_whole_in_annotations() -> None:
    labels = replace(LABELS, environment="_my_env.", replica="r" * 80)
    made = pod(replace(PLAN, labels=labels))["metadata"]
    assert Labels.of(made["annotations"]) == labels
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
