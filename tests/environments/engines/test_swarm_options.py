# SPDX-License-Identifier: Apache-2.0
"""`--engine-option` of Swarm: what each becomes in a service; what it cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest

from openenvd.environments.engines.base import EngineRefused
from openenvd.environments.engines.docker.options import host_config
from openenvd.environments.engines.swarm.options import (
    container_spec,
    service_name,
    split_options,
)


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


def test_volumes_are_mounted_with_their_rights() -> None:
    mounts = spec_of({"volume": "/a:/b:ro,data:/c"})["Mounts"]
    assert mounts == [
        {"Type": "bind", "Source": "/a", "Target": "/b", "ReadOnly": True},
        {"Type": "volume", "Source": "data", "Target": "/c", "ReadOnly": False},
    ]


def test_a_tmpfs_keeps_its_size_and_its_mode() -> None:
    [mount] = spec_of({"tmpfs": "/run:size=8m,mode=700"})["Mounts"]
    assert mount["TmpfsOptions"] == {"SizeBytes": 8 * 2**20, "Mode": 0o700}


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
