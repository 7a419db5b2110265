# SPDX-License-Identifier: Apache-2.0
"""An engine in another process, asked through its channel; and ssh itself, where it fails."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from openenvd.environments.engine_address import EngineAddress
from openenvd.environments.engines import remote_engine, slurm_ssh
from openenvd.environments.engines.base import (
    EngineGone,
    EngineRefused,
    InstanceState,
    Labels,
    ReplicaPlan,
)
from openenvd.environments.engines.registry import address_here
from openenvd.environments.engines.remote_engine import EngineChannel, RemoteEngine
from openenvd.environments.engines.slurm_ssh import SlurmOverSsh
from openenvd.environments.engines.ssh_connection import SshConnection
from openenvd.system.process_identity import boot_seconds

from .process_engine import DIRECTORY_VARIABLE, ProcessEngine

SERVE = """
print("Welcome to login1!", flush=True)
from openenvd.environments.engines.remote_engine import serve
from process_engine import ProcessEngine
serve(ProcessEngine())
"""
PRINT = "print('one'); print('two')"
LABELS = Labels("home", "sample", "sample-0-abc", "abc")
SECONDS = 30.0
LOGIN = {"OPENENV_SLURM_SSH": "login"}
# An ssh whose master is always there, and notes what it forwards.
MASTER = """
for last; do
    [ "$before" = -L ] && target=$last
    before=$last
done
case "$*" in
    *"-O forward"*) echo "$target" >>{log} ;;
    *"-O "*) ;;
    *) exec sh -c "$last" ;;
esac
"""


class Elsewhere(RemoteEngine):
    """An engine in another process."""

    def __init__(self, program: str = SERVE) -> None:
        command = [sys.executable, "-c", program]
        self.connection = EngineChannel(command, "login", gone)

    def channel(self) -> EngineChannel:
        return self.connection


def gone(code: int, told: IO[bytes]) -> EngineGone:
    told.seek(0)
    return EngineGone(f"it has ended with {code}: {told.read().decode()}")


@pytest.fixture
def engine(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessEngine]:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(home / "engine"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    made = ProcessEngine()
    yield made
    for instance in made.list():
        made.remove(instance)


@pytest.fixture
def elsewhere(engine: ProcessEngine) -> Iterator[Elsewhere]:
    made = Elsewhere()
    yield made
    made.connection.close()


@pytest.fixture
def plan(home: Path) -> ReplicaPlan:
    (home / "program.py").write_text(PRINT)
    image = str(home / "program.py")
    return ReplicaPlan(labels=LABELS, image=image, host="127.0.0.1", port=1)


def test_what_is_asked_is_answered_as_by_the_engine_itself(
    elsewhere: Elsewhere, engine: ProcessEngine, plan: ReplicaPlan
) -> None:
    assert elsewhere.find(plan) is None
    started = elsewhere.start(plan)
    assert started.labels == LABELS
    output = b"".join(chunk.data for chunk in elsewhere.logs(started, None))
    assert output == b"one\ntwo\n"
    found = elsewhere.find(plan)
    assert found == engine.find(plan)
    assert found is not None
    assert found.state is InstanceState.EXITED
    assert found.exit is not None
    assert found.exit.exit_code == 0
    assert [each.id for each in elsewhere.list()] == [started.id]
    assert elsewhere.capacity() == engine.capacity()
    elsewhere.remove(started)
    assert engine.list() == []


def test_what_it_refuses_is_refused_in_its_words(elsewhere: Elsewhere, plan: ReplicaPlan) -> None:
    with pytest.raises(EngineRefused, match="there is no image nowhere") as refused:
        elsewhere.start(replace(plan, image="nowhere"))
    assert refused.value.hint == "touch nowhere"


def test_times_are_this_machines(
    elsewhere: Elsewhere,
    engine: ProcessEngine,
    plan: ReplicaPlan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose boot was another one: a day ago there, say."""
    monkeypatch.setattr(remote_engine, "boot_seconds", lambda: boot_seconds() + 86_400)
    later = Elsewhere()
    engine.tell(elsewhere.start(plan), ends_at=1000.0)
    for asked, offset in ((elsewhere, 0), (later, 86_400)):
        found = asked.find(plan)
        assert found is not None
        assert found.ends_at == pytest.approx(1000 + offset, abs=SECONDS)
    later.connection.close()


def test_a_channel_that_ends_fails_what_is_asked_and_what_is_followed(
    elsewhere: Elsewhere, engine: ProcessEngine
) -> None:
    changes = elsewhere.changes()
    next(changes)
    elsewhere.connection.close()
    with pytest.raises(EngineGone):
        next(changes)
    with pytest.raises(EngineGone):
        elsewhere.capacity()
    assert not elsewhere.connection.is_open


def test_another_version_there_is_told_with_what_installs_this_one(home: Path) -> None:
    other = 'print(\'{"openenvd-engine": "0.0.1", "boot_seconds": 0}\', flush=True); input()'
    with pytest.raises(EngineGone, match=r"login has openenvd 0\.0\.1") as told:
        Elsewhere(other)
    assert "pip install . in a clone" in str(told.value.hint)


def test_a_program_that_does_not_start_is_told_by_what_it_prints(home: Path) -> None:
    with pytest.raises(EngineGone, match="No module named 'nothing'"):
        Elsewhere("import nothing")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh")
def test_ssh_that_cannot_connect_says_why_and_what_to_do(tmp_path: Path) -> None:
    connection = SshConnection("ssh://127.0.0.1:1", tmp_path)
    with pytest.raises(EngineGone, match=r"ssh://127.0.0.1:1 has no ssh server") as told:
        connection.open()
    assert told.value.hint == "see that this works: ssh ssh://127.0.0.1:1 true"
    assert not connection.forward(1, "127.0.0.1:1")


def test_without_ssh_what_installs_it_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(EngineGone, match="no command ssh") as told:
        SshConnection("login", home).open()
    assert "openssh-client" in str(told.value.hint)
    check = SlurmOverSsh({**LOGIN, "OPENENV_HOME": str(home)}).check()
    assert "no command ssh" in str(check.problem)
    assert "openssh-client" in str(check.remedy)


@pytest.fixture
def over_ssh(
    home: Path, engine: ProcessEngine, plan: ReplicaPlan, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmOverSsh]:
    """Reaches a replica at node1 through a master that only seems to forward anything."""
    _write_program(home / "ssh", MASTER.format(log=home / "forwarded"))
    _write_program(home / "python", f"exec {sys.executable} -c '{SERVE}'")
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    (home / "program.py").write_text("import time; time.sleep(60)")
    engine.root.with_suffix(".address").write_text("http://node1:{port}")
    variables = {**LOGIN, "OPENENV_SLURM_SSH_PYTHON": str(home / "python")}
    made = SlurmOverSsh({**variables, "OPENENV_HOME": str(home)})
    engine.start(plan)
    while engine.list()[0].state is not InstanceState.RUNNING:
        time.sleep(0.01)
    yield made
    made.close()


def test_a_replica_that_does_not_answer_yet_is_not_taken_for_one_that_is_refused(
    over_ssh: SlurmOverSsh, plan: ReplicaPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(SshConnection, "refusal", lambda _, target: asked.append(target))
    monkeypatch.setattr(slurm_ssh, "PROBE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = over_ssh.find(replace(plan, port=port))
    assert found is not None
    assert found.address == f"http://127.0.0.1:{port}"
    assert asked == []


def test_after_a_lost_connection_ports_are_forwarded_through_whatever_master_is_there(
    home: Path, over_ssh: SlurmOverSsh, plan: ReplicaPlan
) -> None:
    """One that was opened by hand, say, which forwards nothing yet."""
    for _ in range(2):
        found = over_ssh.find(plan)
        assert found is not None
        assert found.address == "http://127.0.0.1:1"
        over_ssh.channel().close()
    assert (home / "forwarded").read_text() == "127.0.0.1:1:node1:1\n" * 2


def _write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def test_an_engine_that_does_not_answer_is_asked_by_another_channel(
    elsewhere: Elsewhere,
    engine: ProcessEngine,
    plan: ReplicaPlan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_engine, "ANSWER_SECONDS", 0.1)
    engine.root.with_suffix(".slow").touch()
    changes = elsewhere.changes()
    next(changes)
    with pytest.raises(EngineGone, match=r"login has not answered for 0\.1 s"):
        elsewhere.start(plan)
    with pytest.raises(EngineGone):
        next(changes)
    assert not elsewhere.connection.is_open


def test_slurm_of_a_login_node_is_another_than_this_machines() -> None:
    here = address_here("slurm", {"SLURM_CONF": "/etc/one.conf"})
    there = address_here("slurm", {"SLURM_CONF": "/etc/one.conf", "OPENENV_SLURM_SSH": "login"})
    assert here.key != there.key
    assert (str(here), str(there)) == ("slurm", "slurm at login")
    assert dict(there.variables)["OPENENV_SLURM_SSH_PYTHON"] == "openenvd/bin/python"
    for each in (here, there):
        assert address_here("slurm", dict(each.variables)) == each
        assert isinstance(each, EngineAddress)
