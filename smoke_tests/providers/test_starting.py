# SPDX-License-Identifier: Apache-2.0
"""Starting: ready, refused, crashed, never ready, cancelled; a replica's variables and GPUs."""

import signal

from ..conftest import eventually
from .harness import NAME, Harness

OUT_OF_MEMORY = 137
STRANGE = 'a b="c";$HOME\\ü\n# %s'


def test_ready(harness: Harness) -> None:
    """A launch ends when its replicas are ready, and prints an address that answers."""
    environment = harness.launched()
    assert environment["state"] == "READY"
    with harness.session(address=environment["address"]) as session:
        assert session.ask("life")
    assert [replica["state"] for replica in harness.environment()["replicas"]] == ["READY"]


def test_answers_say_whose_they_are(harness: Harness) -> None:
    """Answers name their environment, launch and replica."""
    harness.launched()
    health, headers = harness.get("/health")
    assert health["status"] == "healthy"
    assert headers["openenvd-environment"] == NAME
    assert headers["openenvd-generation"] == harness.environment()["request_id"]
    assert headers["openenvd-replica"] == harness.replica()["id"]


def test_crash_at_start(harness: Harness) -> None:
    """An exit at the start fails the launch at once, with exit code and last lines."""
    answer = harness.launch(start="print:no sample today;exit:3")
    assert answer.code == 1, answer.text
    assert "os._exit(3)" in answer.err
    assert "no sample today" in answer.err
    harness.assert_nothing_left()


def test_exception_at_start(harness: Harness) -> None:
    """An exception at the start is shown with its type and text."""
    answer = harness.launch(start="fail:no sample today")
    assert answer.code == 1, answer.text
    assert "RuntimeError: no sample today" in answer.err
    harness.assert_nothing_left()


def test_signal_at_start(harness: Harness) -> None:
    """The end of a replica by a signal at its start is shown with the signal's name."""
    answer = harness.launch(start=f"signal:{signal.SIGSEGV:d}")
    assert answer.code == 1, answer.text
    assert "SIGSEGV" in answer.err
    harness.assert_nothing_left()


def test_out_of_memory_at_start(harness: Harness) -> None:
    """A replica that runs out of memory at its start ends the launch with code 137."""
    answer = harness.launch("--memory", "200M", start="hold:400")
    assert answer.code == OUT_OF_MEMORY, answer.text
    assert "out of memory" in answer.err
    assert "200 MB" in answer.err
    harness.assert_nothing_left()


def test_never_ready(harness: Harness) -> None:
    """A launch that is not ready in time fails with the last lines, and leaves nothing."""
    answer = harness.launch("--set", "ready-timeout=15", start="print:still busy;sleep:600")
    assert answer.code == 1, answer.text
    assert "not ready after 15 s" in answer.err
    assert "still busy" in answer.err
    harness.assert_nothing_left()


def test_cancelled_while_starting(harness: Harness) -> None:
    """A launch that is cancelled while its replica starts leaves nothing."""
    launch = harness.queued(start="print:begun;sleep:600")
    harness.until_printed("begun")
    harness.machine.ok("cancel", launch)
    eventually(lambda: harness.machine.request(launch)["state"] == "CANCELLED")
    harness.assert_nothing_left()


def test_down_while_starting(harness: Harness) -> None:
    """An environment that is taken down while its replica starts leaves nothing."""
    harness.queued(start="print:begun;sleep:600")
    harness.until_printed("begun")
    harness.machine.ok("down", NAME)
    assert NAME not in harness.names()
    harness.assert_nothing_left()


def test_variables(harness: Harness) -> None:
    """Variables keep their values, whatever characters these contain."""
    harness.launched("-e", f"STRANGE={STRANGE}", "-e", "EMPTY=")
    with harness.session() as session:
        assert session.ask("environ", "STRANGE") == STRANGE
        assert session.ask("environ", "EMPTY") == ""


def test_foreign_variables(harness: Harness) -> None:
    """Variables of the shell that the daemon was started from do not reach a replica."""
    harness.machine.environ["SECRET_OF_A_SHELL"] = "hunter2"
    harness.launched()
    assert harness.ask("environ", "SECRET_OF_A_SHELL") is None


def test_gpus(harness: Harness) -> None:
    """Each replica gets a GPU of its own."""
    devices = harness.provider.fake_gpus(harness.machine, 2)
    harness.launched("--gpus", "1", "--replicas", "2")
    ids = [replica["id"] for replica in harness.environment()["replicas"]]
    with harness.sessions_at(ids) as sessions:
        variable = harness.provider.gpu_variable
        seen = [sessions[each].ask("environ", variable) for each in ids]
    assert sorted(seen) == devices
    assert harness.environment()["gpus"]["each"] == 1


def test_too_few_gpus(harness: Harness) -> None:
    """A launch with more GPUs than there are is refused, with the number of GPUs."""
    harness.provider.fake_gpus(harness.machine, 1)
    answer = harness.launch("--gpus", "2")
    assert answer.code == 1, answer.text
    assert "1 GPU" in answer.err
    harness.assert_nothing_left()


def test_names_that_begin_alike(harness: Harness) -> None:
    """Environments whose names begin alike are distinguished."""
    harness.launched(name="sample")
    harness.launched(name="sample-0")
    lives = {name: harness.ask("life", name=name) for name in ("sample", "sample-0")}
    assert len(set(lives.values())) == 2
    harness.machine.ok("down", "sample")
    assert harness.names() == ["sample-0"]
    assert harness.ask("life", name="sample-0") == lives["sample-0"]
