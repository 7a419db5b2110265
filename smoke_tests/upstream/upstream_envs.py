# SPDX-License-Identifier: Apache-2.0
"""Compares upstream's server with ours, by upstream's unchanged environments and their clients.

    python -m smoke_tests.upstream.upstream_envs --upstream-source DIR [--only echo_env,chess_env]
        [--json FILE [--resume]] [--work DIR] [--jobs N]
    python -m smoke_tests.upstream.upstream_envs --short [--only env_0_2_3,env_0_10_0] [--jobs N]

DIR is an existing checkout of upstream's repository: `openenv launch` installs and launches each
`envs/*/` in it. uv downloads dependencies; nothing else is downloaded. `--short` tries what
`openenv init` of six versions of upstream's package generates. `conversations.yaml` has what an
environment's image has beside its packages, as far as possible: further packages (`launch --with`),
variables, and a few small files instead of a data set.

    openenv launch DIR ──▶ ours ──────────┐                  ┌──▶ the same?
    PYTHON -m uvicorn, twice ─▶ upstream's ┴─ typed client ──┘       PYTHON: the project's own

The program compares the client's results and exceptions, every message that it receives, and the
answers to `GET /health`, `/metadata` and `/schema`. Values that differ between two runs of
upstream's own server are listed, and compared only by their JSON type. If one of them is neither an
id nor a time, the environment draws random numbers without our seed, and all later values may
depend on them: then all values are compared by type, and keys by name ("by type").

Where ours works, a session of it is branched, and compared alike with sessions that are
not: as the environment was launched, and launched with `--isolate` (`branches.py`).

Exit code 1: an environment that works on upstream's server does not work on ours, or answers
differently; a session or its branches answer differently after the branch; or a process was left.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from openenvd.environments.preparation.project_venv import overlay_key, venv_key
from openenvd.environments.sources.resolve import Project, resolve
from openenvd.schema.errors import EnvironmentsError
from openenvd.schema.layout import Layout

from ..background import uvicorn
from ..conftest import UPSTREAM_REQUIREMENT, Machine, install, new_machine, python_with
from .branches import branched, unbranched
from .upstream_calls import GENERATED, Conversation, read_conversations
from .upstream_suites import folder_for

HERE = Path(__file__).resolve().parent
LAUNCH_SECONDS = 900.0  # including the installation
CONVERSATION_SECONDS = 240.0
PAGE_SECONDS = 30.0
STOP_SECONDS = 10.0
SHORT_TEXT = 100  # of a value that differs
MORE_RUNS = 3  # of upstream's server, or without branches, before a difference counts
PATHS = ("/health", "/metadata", "/schema")
SHORT_VERSIONS = ("0.2.3", "0.3.1", "0.4.2", "0.6.0", "0.8.0", "0.10.0")
# Uvicorn's command; its first argument lists folders that are appended to the import path.
SERVE = "import sys, uvicorn; sys.path += sys.argv.pop(1).split(':'); uvicorn.main()"
# The `openenv` command of most versions imports gradio, which takes several seconds.
INIT = "import typer; from openenv.cli.commands.init import init; typer.run(init)"
MODERN_SECONDS = 1.6e9  # since 1970: a larger number counts as a time
ID_OR_TIME = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?|\d{4}-\d\d-\d\d[T ]|\d\d:\d\d:\d\d|/tmp/")
# Our server says why a session cannot begin, upstream's does not.
FACTORY_FAILED = re.compile(r"Environment factory '.*' failed to create|could not be created: ")
# Our server also says which exception a step has raised, and where.
ADDED = re.compile(r"\.messages\[\d+\]\.data\.(exception|place|hint)")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")

Json = Any
ABSENT = object()  # a key that an object does not have


@dataclass
class Row:
    """The results for one environment."""

    environment: str
    openenv: str = ""
    install: str = "no"
    upstream: str = "-"
    ours: str = "-"
    equal: str = "-"
    branches_by: str = ""  # without and with `--isolate`
    no_better_tier: str = ""  # a note with the reasons
    note: str = ""
    differences: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)  # why a server does not work

    @property
    def is_defect(self) -> bool:
        """Return whether it works only on upstream's server, or answers differently on ours."""
        return (self.upstream, self.ours) == ("works", "no") or bool(self.differences)


@dataclass
class Run:
    """One conversation with one server; `failure` when there was none."""

    answers: list[Json] = field(default_factory=list)
    openenv: str = ""
    failure: str = ""

    @property
    def why_not(self) -> str:
        """Return why the environment cannot be reset or stepped on that server."""
        raised = [answer["raised"] for answer in self.answers[:2] if "raised" in answer]
        return self.failure or next(iter(raised), "")


@dataclass(frozen=True)
class Subject:
    """An environment to try; its project may still have to be generated."""

    name: str
    conversation: Conversation
    folder: Callable[[], Path]


class Examination:
    """One project: installed, launched, used, and compared."""

    def __init__(self, machine: Machine, folder: Path, conversation: Conversation) -> None:
        self._machine = machine
        self._folder = folder
        self._conversation = conversation
        data = machine.home.parent / "data" / folder.name
        conversation.write_files(data)
        self._variables = conversation.variables_of(folder, data)
        self._name = folder.name.replace("_", "-")
        self._log = machine.home.parent / "logs" / folder.name

    def row(self) -> Row:
        row = Row(self._folder.name)
        started = time.monotonic()
        launched = self._launch()
        try:
            python = self._python()
            if python is None:
                row.note = cause_of(launched)
                return row
            row.install = f"{time.monotonic() - started:.0f} s"
            theirs, ours = self._first_runs(python, launched)
            if not ours.why_not:
                self._branch(row)
        finally:
            self._machine.run("down", self._name)
        self._compare(row, python, theirs, ours)
        return row

    def _branch(self, row: Row) -> None:
        """Branch a session of the environment as it runs, and of a second, isolated launch."""
        tiers, reasons, calls = [], set(), self._conversation.calls
        for options in ((), ("--isolate",)):
            if options:
                self._machine.run("down", self._name)
                if (failure := self._launch(*options)) is not None:
                    row.differences.append(f"{options[0]}: {cause_of(failure)}")
                    break
            address = str(self._machine.environment(self._name)["address"])
            tier, reason, copies = branched(address, calls)
            tiers.append(tier)
            reasons.add(reason)
            plain = [unbranched(address, calls) for _ in range(2)]
            for number, answers in enumerate(copies):
                while not (found := Comparison(plain, answers)).is_equal:
                    if len(plain) == 2 + MORE_RUNS:
                        break
                    plain.append(unbranched(address, calls))
                which = f"branch {number} by {tier}: " if number else f"after a {tier}: "
                row.differences += [which + each for each in found.differences]
        row.branches_by = "; ".join(tiers)
        if reasons := reasons - {""}:
            row.no_better_tier = f"no better tier: {', '.join(sorted(reasons))}"

    def _launch(self, *options: str) -> str | None:
        variables = [word for k, v in self._variables.items() for word in ("-e", f"{k}={v}")]
        more = [word for package in self._conversation.packages for word in ("--with", package)]
        seconds = ["--set", f"timeout={LAUNCH_SECONDS}"]
        words = [str(self._folder), "--name", self._name, *seconds, *variables, *more, *options]
        answer = self._machine.run("launch", *words, timeout=LAUNCH_SECONDS + STOP_SECONDS)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.with_suffix(".launch").write_text(answer.text)
        return None if answer.code == 0 else answer.out + answer.err

    def _first_runs(self, python: Path, launched: str | None) -> tuple[list[Run], Run]:
        if launched is not None:
            return [self._on_upstream(python)], Run(failure=cause_of(launched))
        address = str(self._machine.environment(self._name)["address"])
        if not self._conversation.is_stateless:
            [ours] = self._converse(python, address)
            return [self._on_upstream(python)], ours
        with self._upstream_server(python) as upstream:
            *theirs, ours = self._converse(python, upstream, upstream, address)
        return theirs, ours

    def _python(self) -> Path | None:
        """Return the project's own Python, after the installation."""
        try:
            project = resolve(str(self._folder), self._folder)
        except EnvironmentsError:
            return None
        assert isinstance(project, Project)
        venvs = Layout(self._machine.home).venvs
        python = venvs / venv_key(project) / "bin" / "python"
        if more := self._conversation.packages:
            python = venvs / overlay_key(python, more, self._folder) / "bin" / "python"
        return python if python.exists() else None

    def _compare(self, row: Row, python: Path, theirs: list[Run], ours: Run) -> None:
        row.openenv = theirs[0].openenv or ours.openenv
        for name, run in (("upstream", theirs[0]), ("ours", ours)):
            setattr(row, name, "no" if run.why_not else "works")
            row.why |= {name: run.why_not} if run.why_not else {}
        why = row.why.get("ours", row.why.get("upstream", ""))
        row.note = "; ".join(filter(None, [why, row.no_better_tier]))
        if row.upstream == row.ours and theirs[0].answers and ours.answers:
            if len(theirs) < 2:
                theirs.append(self._on_upstream(python))
            while not (found := Comparison([run.answers for run in theirs], ours.answers)).is_equal:
                if len(theirs) == 2 + MORE_RUNS:
                    break
                theirs.append(self._on_upstream(python))
            row.differences += found.differences
            row.not_compared = found.not_compared
            row.equal = found.verdict
            row.note = "; ".join([*row.differences[:1], *filter(None, [row.note])])

    def _on_upstream(self, python: Path) -> Run:
        try:
            with self._upstream_server(python) as address:
                [run] = self._converse(python, address)
                return run
        except RuntimeError as exc:
            return Run(failure=str(exc))

    @contextmanager
    def _upstream_server(self, python: Path) -> Iterator[str]:
        """Run upstream's server; yields its address.

        Raises:
            RuntimeError: It does not start; the message has its last line.
        """
        above = os.pathsep.join(map(str, self._folder.parents[:2]))  # its neighbours' packages
        log, failure = self._log.with_suffix(".upstream"), ""
        log.unlink(missing_ok=True)
        with ExitStack() as stack:
            for app in (f"{self._folder.name}.server.app:app", "server.app:app"):
                command = (python, "-c", SERVE, above, app)
                server = uvicorn(command, log, cwd=self._folder, env=self._environ)
                try:
                    _, address = stack.enter_context(server)
                    break
                except RuntimeError as exc:
                    failure = failure or _last_line(str(exc))
            else:
                raise RuntimeError(f"upstream's server does not start: {failure}")
            yield address

    @property
    def _environ(self) -> dict[str, str]:
        return {**self._machine.environ, **self._variables}

    def _converse(self, python: Path, *addresses: str) -> list[Run]:
        """Have the same conversation with each server, in one process: its imports take seconds."""
        program = str(HERE / "in_project_venv" / "typed_client.py")
        try:
            done = subprocess.run(
                [str(python), "-P", program, str(self._folder), *addresses],
                input=json.dumps(self._conversation.calls),
                env=self._environ,
                capture_output=True,
                text=True,
                timeout=CONVERSATION_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            failure = f"no end of the conversation within {CONVERSATION_SECONDS:.0f} s"
            return [Run(failure=failure) for _ in addresses]
        if done.returncode != 0:
            failure = f"the client failed: {_last_line(done.stderr)}"
            return [Run(failure=failure) for _ in addresses]
        text = with_own_path(done.stdout.splitlines()[-1], self._machine.home, self._folder)
        said = json.loads(text)
        return [
            Run([*answers, *_pages(address)], said["openenv"])
            for address, answers in zip(addresses, said["conversations"], strict=True)
        ]


class Comparison:
    """Our answers beside those of several runs of upstream's server, or without branches."""

    def __init__(self, theirs: list[Json], ours: Json) -> None:
        self.differences: list[str] = []
        self.not_compared: list[str] = []
        self.is_random = False  # upstream's own answers vary in more than ids and times
        self._walk("", theirs, ours)
        if self.is_random:
            self.differences.clear()
            self._walk("", theirs, ours)

    @property
    def is_equal(self) -> bool:
        return not self.differences

    @property
    def verdict(self) -> str:
        if self.differences:
            return "no"
        return "by type" if self.is_random else "yes"

    def _walk(self, path: str, theirs: list[Json], ours: Json) -> None:
        if all(_same(value, ours) for value in theirs):  # a picture has 100,000 values
            return
        if isinstance(ours, dict) and all(isinstance(value, dict) for value in theirs):
            for key in dict.fromkeys(key for value in (*theirs, ours) for key in value):
                found = [value.get(key, ABSENT) for value in theirs]
                self._walk(f"{path}.{key}", found, ours.get(key, ABSENT))
        elif isinstance(ours, list) and all(isinstance(value, list) for value in theirs):
            self._compare(path, [len(value) for value in theirs], len(ours))
            for index, items in enumerate(zip(*theirs, ours, strict=False)):
                self._walk(f"{path}[{index}]", list(items[:-1]), items[-1])
        else:
            self._compare(path, theirs, ours)

    def _compare(self, path: str, theirs: list[Json], ours: Json) -> None:
        if all(FACTORY_FAILED.search(str(value)) for value in (*theirs, ours)):
            return
        if ADDED.search(path) and all(value is ABSENT for value in theirs):
            return
        if any(not _same(value, theirs[0]) for value in theirs):
            self.is_random |= not all(map(_is_id_or_time, theirs))
            if path not in self.not_compared:
                self.not_compared.append(path)
        if self.is_random or path in self.not_compared:
            types = {_type_of(value) for value in theirs} | {"null"}
            is_equal = _type_of(ours) in types or (types == {"null"} and ours is not ABSENT)
        else:
            is_equal = _same(ours, theirs[0])
        if not is_equal:
            skipped = _alike(theirs[0], ours)
            shown = f"{_short(ours, skipped)} instead of {_short(theirs[0], skipped)}"
            self.differences.append(f"{path}: {shown}")


def with_own_path(text: str, home: Path, folder: Path) -> str:
    """Replace our run folder's link to the project by the project's path."""
    link = rf"{re.escape(str(home))}/run/[^/]+/imports/{folder.name}\b"
    return re.sub(link, lambda _: str(folder), text)


def _same(one: Json, other: Json) -> bool:
    """Compare like JSON: 1 differs from true and from 1.0; NaN equals NaN."""
    if one is ABSENT or other is ABSENT:
        return one is other
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _type_of(value: Json) -> str:
    """Return the JSON type; integers are numbers."""
    kinds = ((bool, "boolean"), (int | float, "number"), (str, "text"), (list, "list"))
    if value is None or value is ABSENT:
        return "null" if value is None else "absent"
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _is_id_or_time(value: Json) -> bool:
    """Return whether a value is or contains an id or a time (ISO, or seconds since 1970)."""
    if isinstance(value, int | float):
        return value > MODERN_SECONDS
    return isinstance(value, str) and ID_OR_TIME.search(value) is not None


def _alike(one: Json, other: Json) -> int:
    """Count the characters that two texts have in common at their start, with a few exceptions."""
    if not isinstance(one, str) or not isinstance(other, str):
        return 0
    alike = zip(one, other, strict=False)
    same = next((n for n, (a, b) in enumerate(alike) if a != b), min(len(one), len(other)))
    return max(0, same - SHORT_TEXT // 2)


def _short(value: Json, skipped: int = 0) -> str:
    if value is ABSENT:
        return "nothing"
    text = json.dumps(f"...{value[skipped:]}" if skipped else value)
    return text if len(text) <= SHORT_TEXT else f"{text[: SHORT_TEXT - 3]}..."


def _pages(address: str) -> list[Json]:
    return [{"call": ["GET", path], "returned": _get(address + path)} for path in PATHS]


def _get(url: str) -> Json:
    try:
        with urlopen(url, timeout=PAGE_SECONDS) as response:
            return json.loads(response.read())
    except HTTPError as exc:
        with exc:
            return exc.code
    except OSError as exc:
        return repr(exc)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in ESCAPE.sub("", text).splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"


def cause_of(launched: str | None) -> str:
    """Return the cause from a failed launch's output: uv's line, or the one below its name."""
    lines = [line.strip() for line in ESCAPE.sub("", launched or "").splitlines() if line.strip()]
    for beginning in ("cause: ", "error: "):
        if found := [line for line in lines if line.startswith(beginning)]:
            return found[-1].removeprefix(beginning)
    failed = [below for line, below in pairwise(lines) if line.startswith("✗")]
    return (failed or lines or ["it does not launch"])[-1]


def examine(
    machine: Machine, subjects: Iterable[Subject], file: Path | None, rows: list[Row], jobs: int
) -> None:
    """Examine environments, several at a time; the results are written after each."""

    def row_of(subject: Subject) -> Row:
        return Examination(machine, subject.folder(), subject.conversation).row()

    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(row_of, subjects):
            print(line_of(row), flush=True)
            for difference in row.differences[1:]:
                print(f"  {difference}")
            rows.append(row)
            if file is not None:
                content = [asdict(item) for item in rows]
                file.write_text(json.dumps(content, indent=1) + "\n")


def line_of(row: Row) -> str:
    cells = (row.openenv, row.install, row.upstream, row.ours, row.equal, row.branches_by)
    note = row.note.replace("\n", " ")
    return f"{row.environment:<24}" + "".join(f"{cell:<12}" for cell in cells) + note[:150]


def upstream_subjects(source: Path, only: list[str]) -> Iterator[Subject]:
    """List upstream's environments, by name.

    Raises:
        SystemExit: `source` has none.
    """
    found = sorted(path.parent for path in (source.resolve() / "envs").glob("*/pyproject.toml"))
    if not found:
        raise SystemExit(f"{source} is no checkout of upstream's repository: no envs/*/")
    for folder in found:
        if not only or folder.name in only:
            conversation = read_conversations().get(folder.name, Conversation())
            yield Subject(folder.name, conversation, partial(Path, folder))


def generated_subjects(work: Path, only: list[str]) -> Iterator[Subject]:
    """List the projects that `openenv init` of several versions of upstream's package generates."""
    python, conversation = python_with(UPSTREAM_REQUIREMENT), read_conversations()[GENERATED]
    for version in SHORT_VERSIONS:
        package = work / "packages" / version
        folder = work / "projects" / f"env_{version.replace('.', '_')}"
        if only and folder.name not in only:
            continue
        install(python.parents[1], "--target", str(package), "--no-deps", f"openenv=={version}")
        yield Subject(folder.name, conversation, partial(generate, folder, python, package))


def generate(folder: Path, python: Path, package: Path) -> Path:
    """Run the `openenv init` of a package, and make the project require the package's version."""
    shutil.rmtree(folder, ignore_errors=True)
    environ = {**os.environ, "PYTHONPATH": str(package), "PATH": os.defpath}  # no uv: no lock
    command = [str(python), "-c", INIT, folder.name, "-o", str(folder.parent)]
    subprocess.run(command, check=True, capture_output=True, cwd=package, env=environ)
    packaging = folder / "pyproject.toml"
    pinned = f'"openenv=={package.name}"'
    packaging.write_text(re.sub(r'"openenv(\[core\])?[>=][^"]*"', pinned, packaging.read_text()))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Upstream's environments on both servers.")
    parser.add_argument("--upstream-source", type=Path, metavar="DIR")
    parser.add_argument("--short", action="store_true", help="six generated projects instead")
    parser.add_argument("--only", default="", metavar="NAME,...")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--resume", action="store_true", help="skip what FILE has already")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="environments at a time")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep installations there")
    options = parser.parse_args()
    if not options.short and options.upstream_source is None:
        parser.error("--upstream-source DIR (a checkout of upstream's repository), or --short")
    rows: list[Row] = []
    if options.resume and options.json and options.json.exists():
        rows = [Row(**item) for item in json.loads(options.json.read_text())]
    done = {row.environment for row in rows}
    only = [name for name in options.only.split(",") if name]
    titles = ("openenv", "install", "upstream", "ours", "equal", "branches by", "note")
    print(line_of(Row("environment", *titles)))
    with folder_for(options.work) as work, new_machine(work / "home") as machine:
        # `git_env` writes git's settings of its user.
        os.environ["GIT_CONFIG_GLOBAL"] = machine.environ["GIT_CONFIG_GLOBAL"] = f"{work}/gitconfig"
        if options.short:
            found = generated_subjects(work, only)
        else:
            found = upstream_subjects(options.upstream_source, only)
        subjects = [subject for subject in found if subject.name not in done]
        examine(machine, subjects, options.json, rows, options.jobs)
    defects = [row.environment for row in rows if row.is_defect]
    works = sum(row.upstream == "works" for row in rows)
    print(f"{len(rows)} tried, {works} work on upstream's server", end="; ")
    print(f"not, or otherwise, on ours: {', '.join(defects) or 'none'}")
    # What `openenv init` generates has to work on upstream's server.
    return 1 if defects or (options.short and works < len(rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
