# SPDX-License-Identifier: Apache-2.0
"""Network links for tests: bridges and namespaces with names that no other run uses."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

NETWORKS = {  # beginnings of addresses; a subnet's number follows
    "docker": "10.213",
    "docker swarms": "10.214",
    "docker other node": "10.215",
    "kubernetes": "10.216",
    "kubernetes services": "10.217",
    "slurm": "10.218",
    "kubernetes other node": "10.220",
    "ray": "10.221",
}
SUBNETS = range(200, 250)


def ip(*words: str) -> None:
    """Run the command `ip`."""
    subprocess.run(["ip", *words], check=True)


def make_bridge(prefix: str, network: str) -> str:
    """Make a bridge with a subnet of its own, and return the bridge's name.

    Args:
        prefix: The beginning of its name, before a number n.
        network: One of `NETWORKS`; the bridge's address is NETWORK.n.1.
    """
    name, subnet = _first_free(prefix, network, "link", "add", "{}", "type", "bridge")
    ip("address", "add", f"{subnet}.1/24", "dev", name)
    ip("link", "set", name, "up")
    return name


def _first_free(prefix: str, network: str, *command: str) -> tuple[str, str]:
    """Run a command of `ip` with a name that no other run has; return the name and its subnet."""
    for number in SUBNETS:
        name = f"{prefix}{number}"
        words = ["ip", *(word.format(name) for word in command)]
        if subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return name, f"{network}.{number}"
    raise AssertionError(f"{prefix}{SUBNETS[0]} to {prefix}{SUBNETS[-1]} seem to be in use")


def make_namespace(prefix: str, network: str) -> str:
    """Make a network namespace and a link to it with the same name, which is returned.

    This end of the link is NETWORK.n.1, the other one NETWORK.n.2.

    Args:
        prefix: The beginning of the name, before a number n.
        network: One of `NETWORKS`.
    """
    name, subnet = _first_free(prefix, network, "netns", "add", "{}")
    try:
        _link(name, subnet)
    except BaseException:
        ip("netns", "delete", name)  # which also deletes the link
        raise
    return name


def _link(name: str, subnet: str) -> None:
    """Make the link to a namespace, with an address at each end."""
    _join(name, f"{subnet}.2")
    ip("address", "add", f"{subnet}.1/24", "dev", name)
    ip("link", "set", name, "up")


def _join(name: str, address: str) -> None:
    """Make the link to a namespace; this end of it is down, and has no address."""
    ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        ip("-n", name, "link", "set", device, "up")


def remove_namespace(name: str) -> None:
    """Remove a namespace of `make_namespace`, with its link."""
    ip("link", "delete", name)
    ip("netns", "delete", name)


@contextlib.contextmanager
def namespace_on(bridge: str, name: str, address: str) -> Iterator[None]:
    """Make a network namespace and a link to a bridge with the same name; removed at the end.

    Args:
        bridge: A bridge of `make_bridge`.
        name: The name of the namespace and of the bridge's end of the link, which `cut` takes down.
        address: The address of the other end, in the bridge's subnet.
    """
    ip("netns", "add", name)
    try:
        _join(name, address)
        ip("link", "set", name, "master", bridge, "up")
        yield
    finally:
        subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
        ip("netns", "delete", name)


def cut(name: str, *, is_cut: bool = True) -> None:
    """Disconnect a namespace from the rest, or connect it again."""
    ip("link", "set", name, "down" if is_cut else "up")


def why_no_namespace() -> str | None:
    """Return why there can be no network namespace here, or None."""
    if shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        return "ip missing: apt-get install iproute2"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return f"no network namespace: {made.stderr.decode().strip()}" if made.returncode else None
