# SPDX-License-Identifier: Apache-2.0
"""An upstream project with one of everything that shows in a frame, as files to be written.

Its modules import upstream's package, which the tests' own Python need not have.
"""

from pathlib import Path

MODELS = """
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field, field_validator

class Say(Action):
    message: str = Field(min_length=1)
    times: int = Field(default=1, ge=1)

    @field_validator("message")
    @classmethod
    def no_shouting(cls, value):
        if value == "SHOUT":
            raise ValueError("do not shout")
        return value

class Heard(Observation):
    text: str = ""
    extras: dict = Field(default_factory=dict)

class Count(State):
    said: int = 0
"""

ENVIRONMENT = """
import datetime, enum, threading
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata
from models import Count, Heard, Say

class Color(enum.Enum):
    RED = "red"

class Base(Environment[Say, Heard, Count]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = Count(episode_id="none")

    def _do_reset(self, **given):
        if given.get("seed") == 13:
            raise RuntimeError("13 is refused")
        self._state = Count(episode_id=given.get("episode_id") or "fresh", mood="calm")
        return Heard(text="reset", extras={k: v for k, v in given.items() if v is not None})

    def _do_step(self, action):
        if action.message == "raise":
            raise KeyError("lost")
        if action.message == "invalid":
            Say(message="")
        if action.message == "none":
            return None
        self._state.step_count += 1
        self._state.said += action.times
        extras = {}
        if action.message == "rich":
            extras = {
                "bytes": b"abc", "when": datetime.datetime(2024, 1, 2, 3, 4, 5),
                "set": {1}, "tuple": (1, 2), "color": Color.RED, "float": 1e22, "int": 2**70,
                "nan": float("nan"), "inf": float("inf"), "model": Say(message="x"), 3: "key",
                "text": "\\u20ac \\U0001f600",
            }
        if action.message == "opaque":
            extras = {"object": object()}
        done = action.message == "end"
        reward = {"true": True, "int": 1, "float": 0.1, "none": None}.get(action.message, 0.5)
        metadata = {"n": self._state.step_count} if action.times > 1 else {}
        if action.message == "hidden":  # in what some versions leave out
            metadata = {"object": object()}
        text = action.message * action.times
        return Heard(text=text, extras=extras, done=done, reward=reward, metadata=metadata)

    @property
    def state(self):
        return self._state

    def get_metadata(self):
        return EnvironmentMetadata(name="listener", description="Listens.", version="2.0")

class Listener(Base):
    def reset(self, seed=None, episode_id=None):
        return self._do_reset(seed=seed, episode_id=episode_id)

    def step(self, action, timeout_s=None):
        return self._do_step(action)

class AsyncListener(Base):
    def reset(self, seed=None, episode_id=None, **kwargs):
        raise NotImplementedError("the async one is wanted")

    def step(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError("the async one is wanted")

    async def reset_async(self, seed=None, episode_id=None, **kwargs):
        return self._do_reset(seed=seed, episode_id=episode_id, **kwargs)

    async def step_async(self, action, timeout_s=None, **kwargs):
        return self._do_step(action)

class Broken(Listener):
    def __init__(self):
        raise OSError("no licence")

class Single(Listener):
    SUPPORTS_CONCURRENT_SESSIONS = False
"""

TOOLS = '''
from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Observation, State

class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("tools")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @mcp.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("as asked")

        super().__init__(mcp)
        self._state = State(episode_id="none")

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id)
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(metadata={"error": f"unknown action {type(action).__name__}"})

    @property
    def state(self):
        return self._state
'''

APP = """
import inspect
from openenv.core.env_server.http_server import create_app
from environment import {name}
from models import Count, Heard, Say
more = dict(state_cls=Count) if "state_cls" in inspect.signature(create_app).parameters else dict()
app = create_app({name}, Say, Heard, env_name="listener", max_concurrent_envs={cap}, **more)
"""

TOOLS_APP = """
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from tools import Tools
app = create_app(Tools, CallToolAction, CallToolObservation, env_name="tools",
                 max_concurrent_envs=8)
"""

# App module → the class it serves.
APPS = {
    "sync_app": "Listener",
    "async_app": "AsyncListener",
    "broken_app": "Broken",
    "single_app": "Single",
}


def write_project(folder: Path) -> None:
    """Write the project's modules into `folder`."""
    for name, class_name in APPS.items():
        cap = 1 if class_name == "Single" else 8
        (folder / f"{name}.py").write_text(APP.format(name=class_name, cap=cap))
    (folder / "models.py").write_text(MODELS)
    (folder / "environment.py").write_text(ENVIRONMENT)
    (folder / "tools.py").write_text(TOOLS)
    (folder / "tools_app.py").write_text(TOOLS_APP)
