# SPDX-License-Identifier: Apache-2.0
"""One environment is to be changed while it is being changed: what is done, what refused, in words.

One test for each pair. Whatever it is, none hangs, and nothing is left of the environment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from openenvd.client.synchronous import Client
from openenvd.environments.shim.client import read_status_file

from ..conftest import Machine, eventually, new_machine
from ..replicas.test_updates import session

# A replica that starts waits for a file to go.
WAITING = """
import os, time
from openenvd.env_host.bundled.echo.environment import EchoEnvironment

def wait():
    while os.path.exists(os.environ["WAIT"]):
        time.sleep(0.02)

wait()

class Sample(EchoEnvironment):
    pass
"""
DONE = ""  # instead of a refusal
UPDATED, LAUNCHED = "is being updated to generation", "is being launched already"
SCALED, RESTARTED = "is being scaled already", "is being restarted already"
STOPPED, STOPPING = "is being taken down already", "is stopping already"

#             update    scale      restart    down
TABLE = {
    "update": (UPDATED, LAUNCHED, LAUNCHED, DONE),
    "scale": (SCALED, SCALED, SCALED, DONE),
    "restart": (RESTARTED, RESTARTED, RESTARTED, DONE),
    "drain": (DONE, DONE, DONE, DONE),  # of what an update has replaced
    "down": (STOPPING, STOPPED, STOPPED, DONE),
}
SECONDS = ("update", "scale", "restart", "down")
PAIRS = [
    (first, second, told)
    for first, row in TABLE.items()
    for second, told in zip(SECONDS, row, strict=True)
]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "sample_env.py").write_text(WAITING)
    with new_machine(folder / "home") as made:
        yield made


class Trial:
    """One environment of its own, two generations old."""

    def __init__(self, machine: Machine, name: str, wait: Path) -> None:
        self.machine, self.name, self.wait = machine, name, wait
        source = ["sample_env:Sample", "--name", name, "--shards", "1"]
        launch = ["launch", *source, "-e", f"WAIT={wait}"]
        self.commands = {
            "update": launch,
            "drain": launch,
            "scale": ["scale", name, "2"],
            "restart": ["restart", name],
            "down": ["down", name],
        }
        self.address = machine.ok(*launch, "--json").json["environment"]["address"]
        machine.ok(*launch)

    def begin(self, first: str, opened: ExitStack) -> str:
        """Begin the first change, which is under way when this returns; returns its request."""
        if first == "drain":
            opened.enter_context(session(self.address))
            self.machine.ok(*self.commands["drain"])
            return ""
        before = len(self.folders())
        self.wait.touch()
        if first == "down":  # which is under way until the shim goes on
            self._signal_shims(signal.SIGSTOP)
            environment = Client(home=self.machine.home, start=False).environment(self.name)
            down = environment.down(grace_seconds=600.0)
            eventually(lambda: self.machine.environment(self.name)["state"] == "STOPPING")
            return down.id
        request = self.machine.ok(*self.commands[first], "--async").out.strip()
        eventually(lambda: len(self.folders()) > before)
        return request

    def release(self) -> None:
        self.wait.unlink(missing_ok=True)
        self._signal_shims(signal.SIGCONT)

    def _signal_shims(self, number: signal.Signals) -> None:
        for folder in self.folders():
            status = read_status_file(folder) or {}
            with suppress(KeyError, ProcessLookupError):  # one that begins, or has just ended
                os.kill(status["shim"]["pid"], number)

    def folders(self) -> list[Path]:
        return list((self.machine.home / "run").glob(f"{self.name}-*"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("first", "second", "expected"), PAIRS)
def test_a_change_that_meets_another(
    changed: Machine, tmp_path: Path, first: str, second: str, expected: str
) -> None:
    trial = Trial(changed, f"{first}-{second}", tmp_path / "wait")
    eventually(lambda: len(trial.folders()) == 1)  # of the first generation nothing is left
    with ExitStack() as opened:
        opened.callback(trial.release)
        request = trial.begin(first, opened)
        answer = changed.run(*trial.commands[second], "--async")
        if expected == DONE:
            assert answer.code == 0, answer.text
        else:
            assert answer.code != 0
            assert f"{trial.name} {expected}" in answer.err
        trial.release()
        ends = [each for each in (request, answer.out.strip()) if each]
        for each in ends:
            changed.run("wait", each)
    is_called_off = second == "down" and first != "down"
    if request:
        state = changed.request(request)["state"]
        assert state == ("CANCELLED" if is_called_off else "SUCCEEDED")
    if expected == DONE:
        assert changed.request(ends[-1])["state"] == "SUCCEEDED"
    if "down" not in (first, second):
        changed.ok("down", trial.name)
    eventually(lambda: trial.folders() == [])
