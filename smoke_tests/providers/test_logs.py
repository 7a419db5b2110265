# SPDX-License-Identifier: Apache-2.0
"""Logs of replicas."""

import subprocess

from .harness import NAME, Harness


def read_until(follower: subprocess.Popen[str], text: str) -> None:
    """Read a command's output until a line contains the text; its end is a failure."""
    assert follower.stdout is not None
    lines = []
    for line in follower.stdout:
        if text in line:
            return
        lines.append(line)
    raise AssertionError(f"ended without {text!r}: {lines}")


def test_log(harness: Harness) -> None:
    """What a replica prints is its log."""
    harness.launched(start="print:at the start")
    harness.ask("print", "in a step")
    harness.until_printed("in a step")
    log = harness.machine.ok("logs", NAME).out
    assert "at the start" in log
    assert "in a step" in log


def test_log_is_followed_across_restarts(harness: Harness) -> None:
    """A followed log continues when the replica is restarted."""
    harness.launched()
    follower = harness.machine.start("logs", NAME, "-f")
    harness.ask("print", "first life")
    read_until(follower, "first life")
    harness.tell_server("exit:7")
    harness.until_restarted()
    harness.ask("print", "second life")
    read_until(follower, "second life")


def test_log_across_daemons(harness: Harness) -> None:
    """The log has what a replica prints while no daemon runs."""
    harness.launched()
    address = harness.environment()["address"]
    harness.machine.kill_daemon()
    with harness.session(address=address) as session:
        session.ask("print", "to nobody")
    harness.machine.ok("up")
    harness.until_ready()
    harness.until_printed("to nobody")
    assert "to nobody" in harness.machine.ok("logs", NAME).out


def test_log_of_each_replica(harness: Harness) -> None:
    """Each replica has a log of its own."""
    harness.launched("--replicas", "2")
    ids = sorted(replica["id"] for replica in harness.environment()["replicas"])
    with harness.sessions_at(ids) as sessions:
        for replica_id, session in sessions.items():
            session.ask("print", f"this is {replica_id}")
    for replica_id in ids:
        harness.until_printed(f"this is {replica_id}")
        log = harness.machine.ok("logs", NAME, "--replica", replica_id).out
        assert [each for each in ids if f"this is {each}" in log] == [replica_id]


def test_log_that_is_not_text(harness: Harness) -> None:
    """A log continues after bytes that are not text, and after lines without an end."""
    harness.launched()
    harness.ask("write", [0xFF, 0xFE, 0x00, 0x41])
    harness.ask("print", " and then a line")
    harness.until_printed("and then a line")
    assert "and then a line" in harness.machine.ok("logs", NAME).out
