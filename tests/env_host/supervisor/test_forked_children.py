# SPDX-License-Identifier: Apache-2.0
"""Processes that an environment forks in a step: their signals and their end are their own.

What they inherit of the host (handlers, the wake-up descriptor of its event loop, the thread that
runs the step) must not reach back: the sessions beside them are served on.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ..conftest import StartHost

CHILDREN = """
import multiprocessing, os, signal, sys, time
from plain import Bare, Seen

fork = multiprocessing.get_context("fork")
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests ignore it


def with_handler(pipe):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(17))
    pipe.send("ready")
    time.sleep(60)


def ended_by(number, child):
    # Python loses a signal whose handler raises in a hook of the fork, or that precedes a sleep.
    for _ in range(30):
        if child.exitcode is None:
            os.kill(child.pid, number)
            child.join(1)
    return child.exitcode


def grade(how):
    if how in ("terminate", "interrupt"):
        child = fork.Process(target=time.sleep, args=(60,))
        child.start()
        return ended_by(signal.SIGTERM if how == "terminate" else signal.SIGINT, child)
    if how == "pool":
        with fork.Pool(2) as pool:
            return sum(pool.map(abs, [-1, -2]))
    if how == "handler":
        here, there = fork.Pipe()
        child = fork.Process(target=with_handler, args=(there,))
        child.start()
        here.recv()
        return ended_by(signal.SIGTERM, child)
    pid = os.fork()
    if pid == 0:
        if how == "exit":
            sys.exit(5)
        if how == "raise":
            raise ValueError("in the child")
        if how == "return":
            return "the child's"
        os._exit(6)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Plain(Bare):
    def step(self, action):
        return Seen(text=str(grade(action.how)))


class Pinned(Plain):
    REQUIRES_SINGLE_THREAD_EXECUTOR = True


class Asynchronous(Bare):
    async def reset_async(self, **kwargs):
        return Seen()

    async def step_async(self, action):
        return Seen(text=str(grade(action.how)))
"""
ENDS = {
    "terminate": "-15",
    "interrupt": "1",  # as `multiprocessing` ends after a KeyboardInterrupt
    "pool": "3",
    "handler": "17",
    "exit": "5",
    "raise": "1",
    "return": "0",
    "_exit": "6",
}


@pytest.mark.parametrize("isolate", [False, True], ids=["shared", "isolated"])
@pytest.mark.parametrize("kind", ["Plain", "Pinned", "Asynchronous"])
def test_a_child_that_a_step_forks_is_no_part_of_the_host(
    serve: StartHost, tmp_path: Path, kind: str, isolate: bool
) -> None:
    (tmp_path / "forking_steps.py").write_text(CHILDREN)
    host = serve(f"forking_steps:{kind}", isolate=isolate, max_sessions=2)
    with host.open() as bystander, host.open() as grading:
        bystander.ask("reset")
        grading.ask("reset")
        servers = {child.pid for child in psutil.Process(host.process.pid).children()}
        for how, end in ENDS.items():
            answer = grading.ask("step", {"how": how})
            assert answer["data"]["observation"]["text"] == end, (how, answer)
            answer = bystander.ask("step", {"how": "_exit"})
            assert answer["data"]["observation"]["text"] == "6", (how, answer)
        family = psutil.Process(host.process.pid).children(recursive=True)
        assert {child.pid for child in family} == servers
    assert host.stop() == 0
