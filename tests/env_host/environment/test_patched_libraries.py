# SPDX-License-Identifier: Apache-2.0
"""A project that patches the standard library for its whole process, as gevent and eventlet do.

What they put in place of a thread, a wait or a child works in their own loop, which runs only while
code of the project runs. Here it does not work at all, so that the host's use of it is seen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import StartHost

PATCHED = """
import _thread, asyncio, os, queue, select, selectors, subprocess, threading, time

thread_ident, main_ident = threading.get_ident, threading.get_ident()
threading.get_ident = lambda: 7 if thread_ident() == main_ident else thread_ident()
threading._active[7] = threading.main_thread()
threading.main_thread()._ident = 7

def patched(*args, **kwargs):
    raise RuntimeError("patched by the project")

for module, names in {
    _thread: ["start_new_thread"],
    os: ["fork", "wait4", "waitpid"],
    queue: ["SimpleQueue"],
    select: ["epoll", "poll", "select"],
    selectors: ["DefaultSelector"],
    subprocess: ["Popen", "run"],
    time: ["sleep"],
}.items():
    for name in names:
        setattr(module, name, patched)

from plain import Plain


class Patched(Plain):
    pass


class Async(Plain):
    async def reset_async(self, **kwargs):
        return self.reset()

    async def step_async(self, action):
        await asyncio.sleep(0)
        return self.step(action)
"""


@pytest.mark.parametrize("isolate", [False, True], ids=["shared", "isolated"])
@pytest.mark.parametrize("kind", ["Patched", "Async"])
def test_the_host_uses_what_was_there_before(
    serve: StartHost, tmp_path: Path, kind: str, isolate: bool
) -> None:
    (tmp_path / "patched.py").write_text(PATCHED)
    env = {"OPENENVD_TRIAL": "1"}
    host = serve(f"patched:{kind}", isolate=isolate, max_sessions=2, shards=2, env=env)
    with host.open() as client, host.open() as other:
        for each in (client, other):
            each.ask("reset")
            for steps in (1, 2):
                answer = each.ask("step", {})
                assert answer["data"]["observation"]["steps"] == steps
    assert host.stop() == 0
