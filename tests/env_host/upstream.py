# SPDX-License-Identifier: Apache-2.0
"""A stand-in for upstream's package, on the real FastAPI: its routes, and what the host touches."""

from pathlib import Path

SERVER = '''
import os
from fastapi import FastAPI, WebSocket

class HTTPEnvServer:
    def __init__(self, env, action_cls, observation_cls, max_concurrent_envs=1, config=None):
        self._env_factory, self.max, self._concurrency_config = env, max_concurrent_envs, config
        self.action_cls, self.observation_cls = action_cls, observation_cls
        self._validate_concurrency_safety()

    def _validate_concurrency_safety(self):
        if self.max > 1 and not self._env_factory.SUPPORTS_CONCURRENT_SESSIONS:
            raise RuntimeError("not marked")

    def register_routes(self, app, mode="simulation"):
        @app.get("/health")
        async def health():
            """Name the process that answers."""
            return os.getpid()

        @app.post("/mcp")
        async def mcp_endpoint():
            return "upstream's"

        @app.websocket("/mcp")
        @app.websocket("/ws")
        async def websocket_endpoint(socket: WebSocket):
            await socket.accept()
            self._env_factory().close()
            await socket.close()

def create_app(env, action_cls, observation_cls, **named):
    app = FastAPI()
    HTTPEnvServer(env, action_cls, observation_cls, **named).register_routes(app)
    return app
'''


def write_upstream(folder: Path) -> None:
    """Write the package, to be imported from there, unless it is there."""
    package = folder / "openenv" / "core" / "env_server"
    if package.exists():
        return
    package.mkdir(parents=True)
    for each in (package, package.parent, package.parent.parent):
        (each / "__init__.py").write_text("")
    (package / "http_server.py").write_text(SERVER)
