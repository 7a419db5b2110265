# SPDX-License-Identifier: Apache-2.0
"""A process is its pid and its start; nothing else is ever signalled. Locks and niceness."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openenvd.system.process.proc import OWN_SESSION, parse_stat, prefer_own_session, read_stat
from openenvd.system.process.process_identity import ProcessIdentity, is_locked

SLEEP = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]


def test_it_is_the_same_however_often_it_is_asked_and_an_unused_pid_is_an_error() -> None:
    assert ProcessIdentity.of(os.getpid()) == ProcessIdentity.of(os.getpid())
    assert ProcessIdentity.of(os.getpid()).is_alive()
    me = ProcessIdentity.of(os.getpid())
    assert ProcessIdentity(*json.loads(json.dumps(me))) == me
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(process.pid)


def test_signal_reaches_the_process_and_never_a_reused_pid_or_a_zombie() -> None:
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE) as process:
        assert ProcessIdentity.of(process.pid).signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE) as process:
        earlier = ProcessIdentity(process.pid, ProcessIdentity.of(process.pid).started_at - 0.01)
        assert not earlier.is_alive()
        assert not earlier.signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == 0
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE) as process:
        identity = ProcessIdentity.of(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert identity.exists()
        assert not identity.is_alive()
        process.communicate()
    assert not identity.exists()
    assert not identity.signal(signal.SIGTERM)


def test_a_name_with_brackets_and_blanks_is_parsed_and_the_own_stat_read() -> None:
    line = "12 (a) b (c) S 1 12 12 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 500 0 0"
    stat = parse_stat(line)
    assert (stat.name, stat.state, stat.parent, stat.session) == ("a) b (c", "S", 1, 12)
    assert stat.started_seconds == 500 / os.sysconf("SC_CLK_TCK")
    own = read_stat(os.getpid())
    assert own is not None
    assert (own.parent, own.session) == (os.getppid(), os.getsid(0))


def test_a_process_whose_state_cannot_be_read_is_not_taken_for_dead() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            read_stat(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# Whether a file is locked is told without getting into the way of others that ask.


def test_a_lock_that_is_held_is_seen_and_one_that_asks_is_no_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with path.open("w") as held:
        assert not is_locked(path)
        fcntl.flock(held, fcntl.LOCK_SH)  # as `is_locked` does for a moment
        assert not is_locked(path)
        fcntl.flock(held, fcntl.LOCK_EX)
        assert is_locked(path)
    assert not is_locked(path)


# The niceness of a session

SET_AND_SHOW = """
from openenvd.system.process.proc import OWN_SESSION, prefer_own_session
print(prefer_own_session(7), open(OWN_SESSION).read())
"""


@pytest.mark.skipif(not Path(OWN_SESSION).exists(), reason="this kernel has no autogroups")
def test_a_session_gets_the_niceness_asked_for() -> None:
    found = subprocess.run(
        [sys.executable, "-c", SET_AND_SHOW],
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert (found[0], found[-2:]) == ("True", ["nice", "7"])


def test_without_autogroups_nothing_happens(tmp_path: Path) -> None:
    assert prefer_own_session(-5, str(tmp_path / "none")) is False
    assert not (tmp_path / "none").exists()


# What is run in a forked child ends as a program of its own does.


PROGRAM = """
import atexit, threading, time
from openenvd.system.process.forking import run_and_exit


def main():
    atexit.register(print, "exited")
    threading.Thread(target=lambda: print(time.sleep(0.2) or "thread")).start()
    print("main")
    return 7


if __name__ == "__main__":
    run_and_exit("__main__:main")
"""


def test_it_waits_for_threads_calls_what_is_registered_and_exits_with_the_returned_code(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (7, ["main", "thread", "exited"]), done.stderr
