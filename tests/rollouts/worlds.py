# SPDX-License-Identifier: Apache-2.0
"""Environments to roll out, as a module to be written beside the host that serves them."""

WORLDS = '''
import asyncio, os, pathlib, threading
from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

class Move(Action):
    what: str = "go"
    size: int = 0

class Seen(Observation):
    step: int = 0
    seed: int | None = None
    text: str = ""
    episode: str = ""

class Walk(Environment[Move, Seen, State]):
    """Five steps long; each is worth its number."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    LENGTH = 5

    def __init__(self):
        with open("instances.log", "a") as log:
            log.write("made\\n")

    async def reset_async(self, seed=None, episode_id=None, **kwargs):
        self.n, self.seed, self.episode = 0, seed, episode_id or ""
        with open("resets.log", "a") as log:
            log.write(f"{episode_id}\\n")
        return self.seen()

    async def step_async(self, action, timeout_s=None):
        self.n += 1
        self.worth = float(self.n)
        with open("steps.log", "a") as log:
            log.write(f"{self.episode} {self.n}\\n")
        await getattr(self, "do_" + action.what)()
        return self.seen(reward=self.worth, text="x" * action.size)

    def reset(self): raise NotImplementedError
    def step(self, action): raise NotImplementedError

    async def do_go(self): pass
    async def do_nan(self): self.worth = float("nan")
    async def do_raise(self): raise RuntimeError("the floor is missing")
    async def do_leave(self): os._exit(4)
    async def do_hang(self): await asyncio.Event().wait()
    async def do_raise_once(self):
        if not pathlib.Path("raised").exists():
            pathlib.Path("raised").touch()
            raise RuntimeError("once only")

    def seen(self, **more):
        done = self.n >= self.LENGTH
        return Seen(step=self.n, seed=self.seed, episode=self.episode, done=done, **more)

    @property
    def state(self):
        return State(episode_id=self.episode, step_count=self.n)

class Endless(Walk):
    LENGTH = 10**9

class Locked(Walk):
    """Not copied by a server, because of its lock."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

class Counting(Locked):
    """A step is worth something else each time that it is taken."""

    async def do_count(self):
        with open("count.log", "a") as log:
            log.write("x")
        self.worth = float(pathlib.Path("count.log").stat().st_size)

class Single(Walk):
    SUPPORTS_CONCURRENT_SESSIONS = False
'''
