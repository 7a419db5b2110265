# SPDX-License-Identifier: Apache-2.0
"""What a zygote forks, and when a shim is a program instead. That forked shims do all that shims do
is tested in `test_shim.py`, which runs for both kinds.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.environments.shim.client import may_fork
from openenvd.system.net.listening_sockets import open_listening_sockets
from openenvd.system.process.descriptors import close_all

from .conftest import ON_LINUX, Replica, Zygote

pytestmark = [ON_LINUX, pytest.mark.parametrize("replica", ["forked"], indirect=True)]
Make = Callable[..., Replica]


def is_program(replica: Replica) -> bool:
    shim = psutil.Process(replica.status["shim"]["pid"])
    return "environments/shim/__main__.py" in " ".join(shim.cmdline())


def test_shim_and_server_have_names_sessions_and_descriptors_of_their_own(replica: Make) -> None:
    fds = [each.detach() for each in open_listening_sockets("127.0.0.1", 0)]
    changes: Any = {"entry": "server_program:look_round", "listen_fds": fds}
    one, two = replica(**changes).ready(), replica(**changes).ready()
    found, other = one.status["info"], two.status["info"]
    shim, server = one.status["shim"]["pid"], one.status["pid"]
    name = one.run_file["replica_id"]
    assert psutil.Process(shim).cmdline()[0] == f"openenvd: shim {name}"
    assert psutil.Process(server).cmdline()[0] == f"openenvd: host {name}"
    assert os.getsid(shim) == shim
    assert os.getsid(server) == server
    assert psutil.Process(shim).cwd() == "/"
    assert found["cwd"] == one.run_file["cwd"]
    assert (found["signals"], found["mask"]) == ([], [])
    assert found["random"] != other["random"]
    standard = {fd: path for fd, path in found["fds"].items() if int(fd) < 3}
    log = one.run_file["log_path"]
    assert standard == {"0": "/dev/null", "1": log, "2": log}
    rest = sorted(path.partition(":")[0] for fd, path in found["fds"].items() if int(fd) > 2)
    assert rest[0] == "pipe"  # the notify pipe; then the listening sockets
    assert set(rest[1:]) == {"socket"}
    assert len(rest) - 1 == len(one.link.request_listeners()) == len(fds) > 1
    assert found["private_kb"] < 10 << 10  # of the 16 MB, and Python, that it can read
    close_all(fds)
    assert may_fork(one.run_file)
    assert not may_fork(one.run_file | {"argv": ["/other/python"]})


def test_many_at_once_share_one_zygote(replica: Make, zygote: Zygote) -> None:
    replicas = [replica() for _ in range(12)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(Replica.ready, replicas))
    shims = [each.status["shim"]["pid"] for each in replicas]
    assert {psutil.Process(pid).ppid() for pid in shims} == {zygote.process.pid}


def test_shims_go_on_without_the_zygote_and_the_next_is_a_program(
    replica: Make, zygote: Zygote, tmp_path: Path
) -> None:
    zygote = Zygote(tmp_path)
    one = replica(fork=zygote.fork).ready()
    assert not is_program(one)
    zygote.may_be_lost = True
    zygote.process.kill()
    assert is_program(replica(fork=zygote.fork).ready())
    one.tell("exit 0")
    one.wait_state("exited")
    one.link.send("start")  # the shim has all that a server needs
    one.wait_state("ready", generation=2)
    zygote.close()


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "LD_PRELOAD", "LC_ALL", "PYTHONUNBUFFERED"])
def test_with_other_variables_that_only_a_start_reads_it_is_a_program(
    replica: Make, zygote: Zygote, name: str
) -> None:
    one = replica(env=zygote.env | {name: ""}).ready()
    assert is_program(one) == (name != "PYTHONUNBUFFERED")
