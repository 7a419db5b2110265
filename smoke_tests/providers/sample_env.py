# SPDX-License-Identifier: Apache-2.0
"""The environment of the facts' replicas, which does what an action says.

Actions in `SAMPLE_AT_START` run when the module is imported, before the replica is ready; other
actions run in steps: `{"do": "print", "argument": "hello"}`. In `SAMPLE_AT_START`, `;` separates
actions and `:` their arguments. The replica's first process serves no session itself, but runs the
action of `{"do": "server", "argument": "exit:3"}`: the action is in a file that all processes of
the replica share, and a signal announces it.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import Process
from pathlib import Path
from typing import Any
from uuid import uuid4

from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

MB = 2**20
LIFE = uuid4().hex  # of the server: a new id after each start
SERVER_PID = os.getpid()
TOLD_SIGNAL = signal.SIGRTMIN + 3  # no env host handles this signal
_told = Path(tempfile.gettempdir(), f"told-{LIFE}")
_held: list[bytearray] = []


class SampleAction(Action):
    """An action: the name of a function of this module without `do_`, and its argument."""

    do: str
    argument: Any = None


class SampleObservation(Observation):
    """The function's result."""

    value: Any = None


class Sample(Environment[SampleAction, SampleObservation, State]):
    """Runs the actions."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = State(episode_id=uuid4().hex)
        self._seconds_to_close = 0.0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> SampleObservation:
        self._state = State(episode_id=episode_id or uuid4().hex)
        return SampleObservation(value=0)

    def step(
        self, action: SampleAction, timeout_s: float | None = None, **kwargs: Any
    ) -> SampleObservation:
        self._state.step_count += 1
        if action.do == "close_slowly":
            self._seconds_to_close = action.argument
            return SampleObservation()
        return SampleObservation(value=_do(action.do, action.argument), reward=1.0)

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        if self._seconds_to_close:
            print("closing", flush=True)
            time.sleep(self._seconds_to_close)
            print("closed", flush=True)


def _do(name: str, argument: Any) -> Any:
    function = globals().get(f"do_{name}")
    return None if function is None else function(argument)


def do_life(_: Any) -> str:
    """Return the id of this life of the server."""
    return LIFE


def do_pid(_: Any) -> int:
    """Return the id of the process that runs the step."""
    return os.getpid()


def do_environ(name: str) -> str | None:
    """Return a variable's value."""
    return os.environ.get(name)


def do_print(text: str) -> None:
    """Print a line to the log."""
    print(text, flush=True)


def do_write(numbers: list[int]) -> None:
    """Write bytes to the log."""
    os.write(1, bytes(numbers))


def do_hold(megabytes: str) -> int:
    """Allocate this number of megabytes, and keep them."""
    _held.append(bytearray(int(megabytes) * MB))
    _held[-1][::4096] = b"1" * len(_held[-1][::4096])
    return sum(len(each) for each in _held)


def do_child_holds(megabytes: str) -> int:
    """Start a program that allocates this number of megabytes; return how it ended."""
    size = int(megabytes) * MB
    code = f"block = bytearray({size}); block[::4096] = b'1' * len(block[::4096])"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode


def do_capabilities(_: object) -> str:
    """Return the capabilities of this process in the kernel's format."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines)["CapEff"].strip()


def do_touch(path: str) -> str:
    """Write a file; return the error, or nothing."""
    try:
        Path(path).touch()
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def do_exit(code: str) -> None:
    """End this process."""
    os._exit(int(code))


def do_signal(number: str) -> None:
    """End this process by a signal."""
    faulthandler.disable()
    with suppress(ValueError):  # raised on the thread of a session
        signal.signal(int(number), signal.SIG_DFL)
    os.kill(os.getpid(), int(number))


def do_fail(text: str) -> None:
    """Raise an exception."""
    raise RuntimeError(text)


def do_sleep(seconds: str) -> None:
    """Sleep for a number of seconds."""
    time.sleep(float(seconds))


def do_server(action: str) -> None:
    """Let the replica's first process run an action."""
    _told.write_text(action)
    os.kill(SERVER_PID, TOLD_SIGNAL)


def do_cpus(seconds: float) -> float:
    """Return how many CPUs two busy processes get together."""
    before, started = os.times(), time.monotonic()
    spinning = [Process(target=_spin, args=(seconds,)) for _ in range(2)]
    for process in spinning:
        process.start()
    for process in spinning:
        process.join()
    after, elapsed = os.times(), time.monotonic() - started
    used = after.children_user + after.children_system
    return (used - before.children_user - before.children_system) / elapsed


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def _do_all(actions: str) -> None:
    for action in filter(None, actions.split(";")):
        name, _, argument = action.partition(":")
        _do(name, argument)


def _on_told(_number: int, _frame: object) -> None:
    action = _told.read_text()
    _told.unlink()
    _do_all(action)


signal.signal(TOLD_SIGNAL, _on_told)
_do_all(os.environ.get("SAMPLE_AT_START", ""))
