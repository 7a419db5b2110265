# SPDX-License-Identifier: Apache-2.0
"""`--engine-option` of Docker and Swarm: what each becomes, and what is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from openenvd.environments.engines.base import EngineRefused
from openenvd.environments.engines.docker.options import host_config
from openenvd.environments.engines.swarm.options import container_spec, service_name, split_options
from openenvd.server.operations.launch import LaunchPayload


@pytest.mark.parametrize(
    ("name", "value", "host"),
    [
        ("shm-size", "64m", {"ShmSize": 64 * 2**20}),
        ("volume", "/a:/b:ro,/c:/d", {"Binds": ["/a:/b:ro", "/c:/d"]}),
        ("tmpfs", "/run:size=8m,mode=700", {"Tmpfs": {"/run": "size=8m,mode=700"}}),
        ("ulimit", "nofile=64:128", {"Ulimits": [{"Name": "nofile", "Soft": 64, "Hard": 128}]}),
        ("init", "false", {"Init": False}),
        ("network", "mine", {"NetworkMode": "mine"}),
        (
            "device",
            "/dev/fuse",
            {
                "Devices": [
                    {
                        "PathOnHost": "/dev/fuse",
                        "PathInContainer": "/dev/fuse",
                        "CgroupPermissions": "rwm",
                    }
                ]
            },
        ),
    ],
)
def test_an_option_becomes_a_part_of_the_host_config(
    name: str, value: str, host: dict[str, Any]
) -> None:
    assert host_config({name: value}, sandbox=False) == (host, {})


def test_the_user_is_the_containers_own_a_sandbox_read_only_and_volumes_mounted() -> None:
    assert host_config({"user": "1000"}, sandbox=False) == ({}, {"User": "1000"})
    host, _ = host_config({"tmpfs": "/data", "cap-drop": "NET_RAW"}, sandbox=True)
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL", "NET_RAW"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert set(host["Tmpfs"]) == {"/tmp", "/data"}
    again, _ = host_config({}, sandbox=True)
    assert set(again["Tmpfs"]) == {"/tmp"}
    mounts = spec_of({"volume": "/a:/b:ro,data:/c"})["Mounts"]
    assert mounts == [
        {"Type": "bind", "Source": "/a", "Target": "/b", "ReadOnly": True},
        {"Type": "volume", "Source": "data", "Target": "/c", "ReadOnly": False},
    ]
    [mount] = spec_of({"tmpfs": "/run:size=8m,mode=700"})["Mounts"]
    assert mount["TmpfsOptions"] == {"SizeBytes": 8 * 2**20, "Mode": 0o700}


@pytest.mark.parametrize(
    ("options", "sandbox", "message"),
    [
        ({"shmsize": "1g"}, False, "docker has no option 'shmsize'"),
        ({"shm-size": "much"}, False, "write a size"),
        ({"privileged": "perhaps"}, False, "write true or false"),
        ({"network": "host"}, False, "no client could connect"),
        ({"pids-limit": "x"}, False, "--engine-option pids-limit=x"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(
    options: dict[str, str], sandbox: bool, message: str
) -> None:
    with pytest.raises(EngineRefused, match=message):
        host_config(options, sandbox=sandbox)


@pytest.mark.parametrize(
    "option",
    [
        "privileged=true",
        "cap-add=SYS_ADMIN",
        "read-only=false",
        "read-only=0",
        "security-opt=seccomp=unconfined",
        "security-opt=no-new-privileges:false",
        "security-opt=no-new-privileges,apparmor=unconfined",
        "volume=/:/host",
        "volume=data:/data,/etc:/etc:ro",
        "volume=../x:/x",
        "device=/dev/sda",
        "ipc=host",
        "ipc=container:other",
        "tmpfs=/tmp:exec,suid",
        "tmpfs=/data:dev",
    ],
)
@pytest.mark.parametrize("provider", ["docker", "swarm"])
def test_no_option_takes_back_what_a_sandbox_drops(provider: str, option: str) -> None:
    words = {"source": "docker://image:1", "provider": provider, "sandbox": True}
    with pytest.raises(ValidationError, match="takes back what --sandbox drops"):
        LaunchPayload(**words, engine_options=[option])


def test_a_sandbox_allows_what_opens_nothing_and_refuses_the_unknown() -> None:
    options = ["volume=data:/data", "read-only=true", "security-opt=no-new-privileges"]
    options += ["privileged=false", "ipc=private", "runtime=runsc", "user=1000"]
    payload = LaunchPayload(source="docker://image:1", sandbox=True, engine_options=options)
    assert payload.provider == "docker"
    with pytest.raises(ValidationError, match="did you mean shm-size"):
        LaunchPayload(source="docker://image:1", engine_options=["shmsize=1g"])
    with pytest.raises(ValidationError, match="a service of Swarm cannot have"):
        LaunchPayload(source="echo", provider="swarm", engine_options=["runtime=runsc"])


def spec_of(options: dict[str, str]) -> dict[str, Any]:
    rest, _ = split_options(options)
    return container_spec(*host_config(rest, sandbox=False))


def test_the_name_of_a_service_has_no_dots_at_most_63_characters_and_is_no_others() -> None:
    replicas = [
        "openenvd-sample-0-15893c0a",
        f"openenvd-{'a' * 63}-0-1",
        f"openenvd-{'a' * 63}-0-2",
    ]
    replicas += ["openenvd-a.b-0-1", "openenvd-a-b-0-1", "openenvd-a_b-0-1"]
    names = [service_name(replica) for replica in replicas]
    assert names[0] == replicas[0]
    assert len(set(names)) == len(replicas)
    assert all(len(name) <= 63 and "." not in name for name in names)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("volume", "/data", "write SOURCE:/path"),
        ("volume", "/a:/b:ro,z", "write SOURCE:/path"),  # Docker's list is split at commas
        ("volume", "/a:/b:z", "write SOURCE:/path"),
        ("tmpfs", "/run:exec", "not exec"),
        ("security-opt", "seccomp=unconfined", "no-new-privileges alone"),
        ("network", "host", "no client could connect"),
        ("privileged", "true", "cannot have Docker's Privileged"),
    ],
)
def test_what_a_service_cannot_have_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(EngineRefused, match=message):
        spec_of({name: value})
