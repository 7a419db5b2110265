# SPDX-License-Identifier: Apache-2.0
"""One home with the provider under test, and a client of its environments.

Everything that a fact needs of every provider is here: it uses commands, the files below the home,
and the protocol of sessions. What differs between providers is in `under_test.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from openenvd.environments.gateway.process import NAME as GATEWAY
from openenvd.environments.gateway.process import PORT_VARIABLE as GATEWAY_PORT_VARIABLE

from ..conftest import Answer, Machine, eventually, free_port, new_machine
from .under_test import UnderTest

Json = dict[str, Any]

NAME = "sample"
Provider = TypeVar("Provider", bound=UnderTest)

MANY_SESSIONS = 40  # by chance all are at one of two replicas once in 2**39


@contextmanager
def running(provider: Provider, folders: pytest.TempPathFactory) -> Iterator[Provider]:
    """Run a provider's engine; skips the test where that is impossible."""
    if (why_not := provider.why_not()) is not None:
        pytest.skip(f"{provider.name} cannot run here: {why_not}")
    with provider.engine(folders.mktemp(provider.name)):
        yield provider


@contextmanager
def home_of(provider: UnderTest, folder: Path) -> Iterator[Harness]:
    """Make an empty home below a folder; nothing of it is left afterwards."""
    with new_machine(folder / "home") as machine:
        machine.environ.update(provider.variables())
        yield Harness(machine, provider)


class Session:
    """A client's session."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    @property
    def replica_id(self) -> str:
        """Its replica, by the answer to its handshake."""
        assert self.socket.response is not None
        return self.socket.response.headers["OpenEnvd-Replica"]

    def send(self, message: Json) -> Json:
        self.socket.send(json.dumps(message))
        answer: Json = json.loads(self.socket.recv(timeout=60))
        return answer

    def reset(self) -> Json:
        return self.send({"type": "reset", "data": {}})

    def ask(self, do: str, argument: object = None) -> Any:
        """Take one step; returns its value."""
        answer = self.send({"type": "step", "data": {"do": do, "argument": argument}})
        assert answer["type"] == "observation", answer
        return answer["data"]["observation"]["value"]


@dataclass
class Harness:
    """One home, whose environments the provider under test runs."""

    machine: Machine
    provider: UnderTest
    # The words that a person has read of an exit, by where: `client`, `status`, `log`.
    words: dict[str, str] = field(default_factory=dict)

    def launch(self, *options: str, name: str = NAME, start: str = "") -> Answer:
        """Run `openenv launch` to its end, whether or not it succeeds."""
        folder = self.machine.home.parent
        return self.machine.run(*self._words(name, start), *options, cwd=folder)

    def launched(self, *options: str, name: str = NAME, start: str = "") -> Json:
        answer = self.launch(*options, "--json", name=name, start=start)
        assert answer.code == 0, answer.text
        environment: Json = answer.json["environment"]
        return environment

    def queued(self, *options: str, name: str = NAME, start: str = "") -> str:
        answer = self.launch(*options, "--async", name=name, start=start)
        assert answer.code == 0, answer.text
        return answer.out.strip()

    def _words(self, name: str, start: str) -> tuple[str, ...]:
        source = self.provider.source(self.machine.home.parent)
        told = ("-e", f"SAMPLE_AT_START={start}") if start else ()
        return ("launch", *source, "--name", name, *told)

    def environment(self, name: str = NAME) -> Json:
        return self.machine.environment(name)

    def names(self) -> list[str]:
        return [environment["name"] for environment in self.machine.status()["environments"]]

    def replica(self, name: str = NAME) -> Json:
        replica: Json = self.environment(name)["replicas"][0]
        return replica

    def states(self, name: str = NAME) -> list[str]:
        return [replica["state"] for replica in self.environment(name)["replicas"]]

    def replica_of(self, replica_id: str, name: str = NAME) -> Json:
        [found] = [r for r in self.environment(name)["replicas"] if r["id"] == replica_id]
        replica: Json = found
        return replica

    def until_all_ready(self, count: int, name: str = NAME) -> None:
        eventually(lambda: self.states(name) == ["READY"] * count, within=60)

    def until_restarted(self, name: str = NAME, restarts: int = 1) -> Json:
        """Wait until its first replica is ready again; returns that replica."""

        def is_back() -> bool:
            replica = self.replica(name)
            return bool(replica["state"] == "READY" and replica["restarts"] >= restarts)

        eventually(is_back, within=60)
        replica = self.replica(name)
        self.words["status"] = replica["message"] or ""
        return replica

    def until_ready(self, name: str = NAME) -> None:
        eventually(lambda: name in self.names(), within=60)
        eventually(lambda: self.environment(name)["state"] == "READY", within=60)

    def until_served(self, name: str = NAME) -> None:
        """Wait until a session can begin, even if status shows ready too early.

        While an engine restarts, it may accept a replica's connections and close them, or end the
        old replica under a session that has just begun.
        """

        def is_served() -> bool:
            try:
                return self.refused(name) is None
            except (OSError, WebSocketException):
                return False

        eventually(is_served, within=60)

    def log(self, name: str = NAME) -> str:
        """Return the output of all its replicas, from files that outlive them."""
        folder = self.machine.home / "logs" / "environments" / name
        return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.log")))

    def until_printed(self, text: str, name: str = NAME) -> None:
        eventually(lambda: text in self.log(name), within=60)
        line = next(line for line in self.log(name).splitlines() if text in line)
        self.words.setdefault("log", line)

    @contextmanager
    def session(self, name: str = NAME, address: str | None = None) -> Iterator[Session]:
        with self._connected("/ws", name, address) as session:
            assert session.reset()["type"] == "observation"
            yield session

    def attached(self, session_id: str) -> AbstractContextManager[Session]:
        """Connect to a session that a request has begun."""
        return self._connected(f"/ws?session_id={session_id}")

    @contextmanager
    def _connected(
        self, path: str, name: str = NAME, address: str | None = None
    ) -> Iterator[Session]:
        address = address or self.environment(name)["address"]
        with connect(address.replace("http", "ws", 1) + path, open_timeout=30) as socket:
            yield Session(socket)

    def ask(self, do: str, argument: object = None, *, name: str = NAME) -> Any:
        with self.session(name) as session:
            return session.ask(do, argument)

    @contextmanager
    def sessions_at(
        self, replica_ids: list[str], address: str | None = None
    ) -> Iterator[dict[str, Session]]:
        """Open a session at each of these replicas, by opening as many as that takes."""
        found: dict[str, Session] = {}
        address = address or self.environment()["address"]
        with ExitStack() as sessions:
            for _ in range(MANY_SESSIONS):
                session = sessions.enter_context(self.session(address=address))
                found.setdefault(session.replica_id, session)
                if set(found) >= set(replica_ids):
                    yield found
                    return
        raise AssertionError(f"{MANY_SESSIONS} sessions were all at {sorted(found)}")

    def refused(self, name: str = NAME) -> str | None:
        """Return why a session cannot begin, in the server's words, or None."""
        address = self.environment(name)["address"]
        try:
            with connect(address.replace("http", "ws", 1) + "/ws", open_timeout=30) as socket:
                with suppress(ConnectionClosed):  # the server may refuse before the client asks
                    socket.send('{"type": "reset", "data": {}}')
                answer = str(socket.recv(timeout=60))
                return None if json.loads(answer)["type"] == "observation" else answer
        except InvalidStatus as exc:  # a gateway refuses the handshake
            return f"{exc.response.status_code} {(exc.response.body or b'').decode()}"

    def tell(self, do: str, argument: object, name: str = NAME) -> str:
        """Take a step whose answer may never come; returns what the client is told instead."""
        with self.session(name) as session:
            message = {"type": "step", "data": {"do": do, "argument": argument}}
            session.socket.send(json.dumps(message))
            with suppress(ConnectionClosed):
                told = str(session.socket.recv(timeout=60))
                self.words.setdefault("client", json.loads(told)["data"].get("message", ""))
                return told
        return ""

    def told(self, text: str, name: str = NAME) -> Json:
        """Wait for an exit of its first replica whose message in `openenv status` has the text."""

        def found() -> list[Json]:
            return [one for one in self.replica(name)["exits"] if text in one["message"]]

        eventually(lambda: found() and text in self.machine.ok("status", name).out, within=30)
        self.words.setdefault("status", found()[0]["message"])
        return found()[0]

    def tell_server(self, action: str, name: str = NAME) -> None:
        """Make the first process of a replica do something, such as exit."""
        self.tell("server", action, name)

    def get(self, route: str, name: str = NAME, headers: Json | None = None) -> tuple[Any, Json]:
        request = Request(self.environment(name)["address"] + route, headers=headers or {})
        with urlopen(request, timeout=30) as response:
            found = {key.lower(): value for key, value in response.headers.items()}
            return json.load(response), found

    # Processes

    def run_dirs(self) -> list[Path]:
        return [run_dir for run_dir in self._all_run_dirs() if run_dir.name != GATEWAY]

    def _all_run_dirs(self) -> list[Path]:
        runs = self.machine.home / "run"
        return sorted(runs.iterdir()) if runs.exists() else []

    def agents(self) -> list[psutil.Process]:
        """List the processes that report the replicas' status: shims, or the engine's agent."""
        pids = set()
        for run_dir in self.run_dirs():
            for file in ("status.json", "replica.json"):
                if (run_dir / file).exists():
                    said = json.loads((run_dir / file).read_text())
                    found = said.get("shim") or said.get("agent")
                    pids |= {found["pid"]} if found else set()
        return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

    def kill_agents(self) -> None:
        """Kill all agents by SIGKILL, and wait until they are gone."""
        eventually(self.agents)
        for agent in self.agents():
            self.kill(agent.pid)

    def kill(self, pid: int) -> None:
        process = psutil.Process(pid)
        process.kill()
        psutil.wait_procs([process], timeout=10)

    def restart_daemon(self) -> None:
        """Kill the daemon by SIGKILL, and start the next one."""
        self.machine.kill_daemon()
        self.machine.ok("up")

    def assert_nothing_left(self) -> None:
        """Assert that no replica and no gateway runs, and that no replica has files."""
        eventually(lambda: not self.provider.replicas_of(self.machine))
        eventually(lambda: not self._all_run_dirs())

    def chosen_port(self) -> tuple[str, ...]:
        """Return launch options with a port of its own; without `--port`, set the gateway's."""
        port = str(free_port())
        if "test_port" not in self.provider.does_not_apply:
            return ("--port", port)
        self.machine.environ[GATEWAY_PORT_VARIABLE] = port  # for a daemon that has not started yet
        return ()

    @staticmethod
    def listening_at(address: str) -> set[str]:
        """Return the interfaces on which this machine listens at an address's port."""
        port = urlsplit(address).port
        found = [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        return {each.ip for each in found if each and each.port == port}
