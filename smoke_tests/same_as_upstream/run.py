# SPDX-License-Identifier: Apache-2.0
"""Compares upstream's own server with ours by habits of environments' authors.

    habits of one module, or one alone ──▶ project ─┬─▶ uvicorn, in a Python without ours ──┐
                                                    ├─▶ openenv launch ─────────────────────┤
                                                    ├─▶ openenv launch --isolate ───────────┤
                                                    └─▶ openenv launch --provider docker    │
              for each habit: `in_project/talk.py` talks to the server, then what is left ◀─┘

`talk.py` is upstream's client: one session has the habit, a bystander steps before and after it,
and a later session has it again. `compare` classifies each difference: ours is better, worse, or
other. From best to worst, a session is answered, gets an error, ends with a reason, is
disconnected, or waits in vain. Processes that are left when all sessions have ended are worse than
none; other files are a difference.

Each server has a copy of the project, a `TMPDIR`, and an environment variable that marks the
processes it started. All habits of a module use the same server, which is started again after a
habit that has ended it. A few habits share two servers, one of them for coroutines.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import psutil

from ..background import Program, answers, title, uvicorn
from ..conftest import UPSTREAM_REQUIREMENT, Machine, eventually
from ..upstream.upstream_python import UpstreamPython
from .habits.habit import BETTER, ON_PURPOSE, Habit

HERE = Path(__file__).resolve().parent
TALK = (HERE / "in_project" / "talk.py").read_text()
REQUIREMENTS = ("nest_asyncio", "gevent", "numpy", UPSTREAM_REQUIREMENT)
PACKAGING = f"""\
[project]
name = "habit-env"
version = "1"
requires-python = ">=3.11"
dependencies = {json.dumps(list(REQUIREMENTS))}
"""
MANIFEST = "spec_version: 1\nname: habit_env\ntype: space\nruntime: fastapi\napp: server.app:app\n"
WAYS = {"shared": (), "isolated": ("--isolate",), "docker": ("--provider", "docker")}
VARIABLE = "SAME_AS_UPSTREAM"
ANSWER_SECONDS = 15.0  # that a session waits
START_SECONDS = 300.0  # on a busy machine, where an image is made first
TOO_LATE = "--set timeout="  # part of the advice when a launch took longer
OF_SERVERS = r"^openenvd: host|docker-init|env_host/__main__|multiprocessing.resource_tracker"
SETTLE_SECONDS = 4.0  # processes whose sessions have ended may still be there
FEW = 20  # habits
Json = Any


@dataclass
class Seen:
    """The behaviour of one server with one habit."""

    said: dict[str, list[Json]] = field(default_factory=dict)  # answers by session
    left: list[str] = field(default_factory=list)  # processes, after the sessions
    left_at_the_end: list[str] = field(default_factory=list)  # after the server
    files: list[str] | None = None  # None: a container's are not compared
    failure: str = ""  # why the server did not start


class Finding(NamedTuple):
    """A difference; ours is `better`, `worse`, or `other`, or it `fails` to start."""

    kind: str
    text: str


class Group(NamedTuple):
    """Habits that are served together."""

    name: str
    habits: tuple[Habit, ...]


def groups_of(habits: Sequence[Habit]) -> list[Group]:
    found: dict[str, list[Habit]] = {}
    for habit in habits:
        shared = habit.module if len(habits) > FEW else ("few", "few-async")[is_async(habit)]
        name = habit.name if habit.alone else shared
        found.setdefault(name.replace("_", "-"), []).append(habit)
    return [Group(name, tuple(each)) for name, each in found.items()]


def is_async(habit: Habit) -> bool:
    return inspect.iscoroutinefunction(habit.call)


def write_project(folder: Path, group: Group) -> Path:
    first = group.habits[0]
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE / "habits", folder / "habits", ignore=ignored)
    shutil.copy(HERE / "in_project" / "serving.py", folder)
    names = {
        "MODULES": ", ".join(dict.fromkeys(habit.module for habit in group.habits)),
        '"NAME"': repr(first.name if first.alone else ""),
        "SERVED": "ServedAsync" if is_async(first) else "Served",
    }
    app = (HERE / "in_project" / "app.py").read_text()
    for name, made in names.items():
        app = app.replace(name, made)
    before, after = (
        "".join(inspect.cleandoc(getattr(habit, name)) + "\n" for habit in group.habits)
        for name in ("at_import", "at_end")
    )
    files = {
        "openenv.yaml": MANIFEST,
        "pyproject.toml": PACKAGING,
        "habits/__init__.py": "",
        "server/__init__.py": "",
        "server/app.py": before + app + after,
    }
    for habit in group.habits:
        files |= {name: inspect.cleandoc(text) + "\n" for name, text in habit.files.items()}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class Trial:
    """Runs groups of habits on all servers.

    Args:
        machine: The machine whose `openenv` is used.
        upstream: A Python with `REQUIREMENTS` and without our package.
        ways: The ways of our server, by their names in `WAYS`.
    """

    def __init__(self, machine: Machine, upstream: Path, ways: tuple[str, ...]) -> None:
        self._machine = machine
        self._upstream = upstream
        self._ways = ways
        self._folder = machine.home.parent / "trials"
        self._launching = Lock()  # images that are built at the same time share no layers

    def run(self, habits: Sequence[Habit], jobs: int = 2) -> dict[str, dict[str, Seen]]:
        """Run habits on all servers; returns the behaviour by the names of habit and server."""
        found: dict[str, dict[str, Seen]] = {}
        groups = groups_of(habits)
        with ThreadPoolExecutor(jobs) as pool:
            for group, seen in zip(groups, pool.map(self._of_group, groups), strict=True):
                for habit in group.habits:
                    found[habit.name] = {way: by[habit.name] for way, by in seen.items()}
        return found

    def _of_group(self, group: Group) -> dict[str, dict[str, Seen]]:
        python = UpstreamPython(self._upstream, _made(self._folder / group.name / "client"))
        try:
            ways = ("upstream", *self._ways)
            return {way: dict(self._on_server(group, way, python)) for way in ways}
        finally:
            python.stop()

    def _on_server(
        self, group: Group, way: str, python: UpstreamPython
    ) -> Iterator[tuple[str, Seen]]:
        left = list(group.habits)
        tries = 0
        while left:
            tries += 1
            place = Place(self._folder / group.name / f"{way}-{tries}", group)
            start = self._on_upstream if way == "upstream" else self._on_ours(way)
            try:
                with start(place) as address:
                    while left:
                        habit = left.pop(0)
                        seen = place.see(habit, address, python)
                        if way == "docker":
                            seen.files = None
                        yield habit.name, seen
                        if place.is_over(address):
                            break
            except RuntimeError as exc:
                while left:
                    yield left.pop(0).name, Seen(failure=str(exc))
                return
            seen.left_at_the_end = place.processes()
            place.end()

    @contextmanager
    def _on_upstream(self, place: Place) -> Iterator[str]:
        command = (self._upstream.with_name("uvicorn"), "server.app:app")
        environ = {**self._machine.environ, **place.variables}
        server = uvicorn(command, place.log, cwd=place.project, env=environ)
        with server as (place.server, address):
            yield address

    def _on_ours(self, way: str) -> Callable[[Place], Any]:
        @contextmanager
        def start(place: Place) -> Iterator[str]:
            variables = [
                word for pair in place.variables.items() for word in ("-e", "=".join(pair))
            ]
            name = f"{place.group.name}-{way}"
            options = [*WAYS[way], *variables, "--set", f"timeout={START_SECONDS * 2}"]
            words = ("launch", str(place.project), "--name", name, *options)
            with self._launching if way == "docker" else nullcontext():
                answer = self._machine.run(*words, timeout=START_SECONDS * 3)
            try:
                if answer.code != 0:
                    raise RuntimeError(answer.text)
                yield str(self._machine.environment(name)["address"])
            finally:
                place.log.write_text(self._machine.run("logs", name).text)
                self._machine.run("down", name)

        return start


class Place:
    """Where one server runs: its project, its files, its processes."""

    def __init__(self, folder: Path, group: Group) -> None:
        self.group = group
        self.project = write_project(folder / "habit_env", group)
        self.log = folder / "log"
        self._temporary = _made(folder / "tmp")
        self.variables = {VARIABLE: str(folder), "TMPDIR": str(self._temporary)}
        self.server: Program | None = None
        self._own: set[int] = set()  # the server's own processes

    def is_over(self, address: str) -> bool:
        """Return whether upstream's server has ended; wait for ours, which is restarted."""
        if self.server is not None:
            return not answers(address)
        eventually(lambda: answers(address), within=START_SECONDS)
        return False

    def see(self, habit: Habit, address: str, python: UpstreamPython) -> Seen:
        self._own = {process.pid for process in self._all()}
        before = self._files()
        asked = {
            "steps": habit.steps,
            "resets": habit.resets,
            "reset": {**habit.options, **({} if habit.alone else {"habit": habit.name})},
            "posts": habit.posts,
            "seconds": ANSWER_SECONDS,
        }
        environ = {"PATH": str(self.project)}
        said = python.run(
            TALK, address, json.dumps(asked), folder=self.project.parent, environ=environ
        )
        deadline = time.monotonic() + SETTLE_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        files = [_without_chance(name) for name in self._files() - before]
        return Seen(json.loads(said), left, [], sorted(files))

    def processes(self) -> list[str]:
        return [
            f"{each.pid} {title(each)}"[:150]
            for each in self._all()
            if not self._is_the_servers(each)
        ]

    def end(self) -> None:
        for process in self._all():
            with suppress(psutil.Error):
                process.kill()

    def _all(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if self._is_here(each)]

    def _is_here(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(VARIABLE) == self.variables[VARIABLE]
        except psutil.Error:
            return False

    def _is_the_servers(self, process: psutil.Process) -> bool:
        """Return whether a process is older, another shard or host, or ends with its parent."""
        with suppress(psutil.Error):
            parent = process.parent()
            if "shard" in process.name():
                is_own = parent is not None and "shard" not in parent.name()
            else:
                is_own = re.search(OF_SERVERS, title(process)) is not None
            return process.pid in self._own or is_own
        return True

    def _files(self) -> set[str]:
        found = [*self.project.rglob("*"), *self._temporary.rglob("*")]
        parent = self.project.parent
        return {str(p.relative_to(parent)) for p in found if "__pycache__" not in p.parts}


def compare(theirs: Seen, ours: Seen) -> list[Finding]:
    if theirs.failure or ours.failure:
        refused = all(_rank(each) > 1 for answers in theirs.said.values() for each in answers)
        meant = refused and not theirs.failure and TOO_LATE not in ours.failure
        kind = "better" if meant or not ours.failure else "fails"
        text = f"does not start: {ours.failure or theirs.failure}"
        return [] if theirs.failure and ours.failure else [Finding(kind, text)]
    found = []
    for who, said in theirs.said.items():
        for number, pair in enumerate(zip_longest(said, ours.said[who])):
            if kind := _compared(*pair):
                found.append(
                    Finding(kind, f"{who} {number}: {_short(pair[0])} / {_short(pair[1])}")
                )
    for there, here in (
        (theirs.left, ours.left),
        (theirs.left_at_the_end, ours.left_at_the_end),
    ):
        if len(there) != len(here):
            kind = "better" if len(there) > len(here) else "worse"
            found.append(Finding(kind, f"left: {there} / {here}"))
    if theirs.files is not None and ours.files is not None and theirs.files != ours.files:
        kind = "better" if set(ours.files) < set(theirs.files) else "worse"
        found.append(Finding(kind, f"files: {theirs.files} / {ours.files}"))
    return found


def is_as_declared(habit: Habit, way: str, findings: list[Finding]) -> bool:
    """Return whether the differences are those that a habit declares."""
    declared = habit.declared(way)
    kinds = {finding.kind for finding in findings}
    if declared.startswith(ON_PURPOSE):
        return bool(kinds) and "fails" not in kinds
    if not declared.startswith(BETTER):
        return not kinds
    return kinds == {"better"} or (habit.unsteady and not kinds)


def _compared(theirs: Json, ours: Json) -> str:
    ranks = _rank(theirs), _rank(ours)
    if ranks[0] != ranks[1]:
        return "better" if ranks[1] < ranks[0] else "worse"
    if ranks[0] > 1 or json.dumps(theirs) == json.dumps(ours):
        return ""
    return "other"


def _rank(answer: Json) -> int:
    """Rank an answer: a result, an error, an end with a reason, one without, or silence."""
    raised = str((answer or {}).get("raised", ""))
    if not raised:
        return 0
    if "TimeoutError" in raised:
        return 4
    code = re.search(r"\(code: (\w+)\)$", raised)
    if code is None:
        return 3
    return 2 if code[1] in ("SESSION_ERROR", "FACTORY_ERROR", "CAPACITY_REACHED") else 1


def _short(answer: Json) -> str:
    return json.dumps(answer)[:300]


def _without_chance(name: str) -> str:
    made = r"\btmp[a-z0-9_]{8}\b|(?<=tmp)\w+|(?<=pymp-)\w+|(?<=listener-)\w+"
    return re.sub(rf"{made}|(?<![a-z0-9_])[a-z0-9_]*\d[a-z0-9_]*", "*", name)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
