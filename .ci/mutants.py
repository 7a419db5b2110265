# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: which small defects in the core would no test notice?

    python .ci/mutants.py --number 200 --seed 28 --results mutants.jsonl
    python .ci/mutants.py --list                     # what would be drawn

Edits worktrees in a folder for temporary files, never the checkout. One run of a room's tests with
`coverage` shows which of them execute a line; a mutant runs those, the fastest first, until one
fails. A failure counts when the test fails a second time. Results are one JSON object a line, and a
later call continues where an earlier one ended. A mutant that survives shows a missing test, or
changes nothing that a user or another module could notice; the latter are in
`equivalent_mutants.json`, each with its reason. Needs Linux.

The draw depends on the seed and each mutant's own key, so that a change elsewhere in the tree
leaves most of the drawn mutants as they were.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import difflib
import hashlib
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The rooms that are mutated, and the tests that are to notice.
ROOMS = {
    "server/dispatch": ("tests/server/dispatch", "tests/server/test_daemon.py"),
    "executor": ("tests/executor",),
    "requests_db": ("tests/requests_db",),
    "server/reconcile": ("tests/server/reconcile",),
    "environments/gateway": (
        "tests/environments/test_gateway.py",
        "tests/server/reconcile/test_gateway_backends.py",
    ),
    "environments/shim": ("tests/environments/shim",),
}
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
# A test may take this long, which is many times what the slowest takes.
TEST_TIMEOUT_SECONDS = 90
MAX_MUTANT_SECONDS = 600
FIRST_TESTS = 20
USAGE_ERROR = 4  # of pytest: no such test, or a conftest that cannot be imported
SURVIVED, KILLED = "survived", "killed"

# ---------------------------------------------------------------- generating mutants

OPERATORS: dict[Any, Any] = {
    left: right
    for pair in (
        (ast.Lt, ast.LtE),
        (ast.Gt, ast.GtE),
        (ast.Eq, ast.NotEq),
        (ast.Is, ast.IsNot),
        (ast.In, ast.NotIn),
        (ast.And, ast.Or),
        (ast.Add, ast.Sub),
        (ast.Mult, ast.FloorDiv),
    )
    for left, right in (pair, pair[::-1])
}
LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}
# Their results are for people who debug.
UNSEEN_FUNCTIONS = {"__repr__", "__str__"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of one place in one module.

    Attributes:
        path: The module, relative to the repository's root.
        function: The qualified name of the function or class around it.
        before: The source that is replaced, as `ast.unparse` writes it.
        after: What replaces it.
        nth: Which of the places in this function that have the same change.
        lines: The lines whose execution makes a test one that may notice.
        span: From where to where the source is replaced, as offsets of bytes.
    """

    path: str
    function: str
    before: str
    after: str
    nth: int
    lines: tuple[int, int]
    span: tuple[int, int]

    @property
    def key(self) -> str:
        """What identifies the mutant while lines above it come and go."""
        return f"{self.path} {self.function} {self.nth}: {self.before} -> {self.after}"

    @property
    def room(self) -> str:
        """The room of its module."""
        return next(room for room in ROOMS if self.path.startswith(f"{room}/"))

    def apply(self, source: bytes) -> bytes:
        """Return the module's source with this change."""
        start, end = self.span
        return source[:start] + self.after.encode() + source[end:]


class Points(ast.NodeVisitor):
    """Collects every mutant of a module."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.mutants: list[Mutant] = []
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names: list[str] = []
        self._lines = (1, 1)
        self._seen: collections.Counter[tuple[str, ...]] = collections.Counter()

    def _add(self, node: ast.expr | ast.stmt, after: ast.AST | str) -> None:
        before = ast.unparse(node)
        text = after if isinstance(after, str) else ast.unparse(after)
        if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
            text = f"({text})"
        same = (".".join(self._names), before, text)
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        self.mutants.append(Mutant(self.path, *same, self._seen[same], self._lines, (start, end)))
        self._seen[same] += 1

    def visit(self, node: ast.AST) -> None:
        """Visit a node; of a statement, remember its lines, or those of its head."""
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            self._lines = (node.lineno, max(node.lineno, last))
        super().visit(node)

    def _visit_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        if node.name in UNSEEN_FUNCTIONS:
            return
        self._names.append(node.name)
        if not isinstance(node, ast.ClassDef):
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                if default is not None:
                    self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_scope  # noqa: N815

    def visit_If(self, node: ast.If) -> None:
        """Negate the condition; what only type checkers see is left out."""
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negate(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Negate the condition."""
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        """Negate the condition."""
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._add(test, test.operand)
        elif not isinstance(test, ast.Compare):  # whose operator is changed
            self._add(test, ast.UnaryOp(ast.Not(), test))

    def visit_Compare(self, node: ast.Compare) -> None:
        """Replace each operator: `<` by `<=`, `==` by `!=`, and so on (`OPERATORS`)."""
        for index, op in enumerate(node.ops):
            ops = [*node.ops]
            ops[index] = OPERATORS[type(op)]()
            self._add(node, ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Replace `and` by `or`, and `or` by `and`."""
        self._add(node, ast.BoolOp(OPERATORS[type(node.op)](), node.values))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Replace an arithmetic operator by its inverse, except where strings are joined."""
        text = any(
            isinstance(side, ast.JoinedStr)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
            for side in (node.left, node.right)
        )
        if type(node.op) in OPERATORS and not text:
            self._add(node, ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Add one to a number, negate a boolean, change a name (a text without a blank)."""
        value = node.value
        if isinstance(value, bool):
            self._add(node, repr(not value))
        elif isinstance(value, int | float):
            self._add(node, repr(value + 1))
        elif isinstance(value, str) and value and len(value.split()) == 1:
            self._add(node, repr(f"{value}X"))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip f-strings: they are messages, and Python 3.11 gives no positions of their parts."""

    def visit_Expr(self, node: ast.Expr) -> None:
        """Remove a call, unless it writes a log line; docstrings are skipped."""
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Constant):
            return
        called = value.func if isinstance(value, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in LOGGING:
            return
        if called is not None:
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Remove what changes an object; without a local name the code would not even run."""
        if not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets):
            self._add(node, "pass")
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Skip the annotation."""
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Remove it."""
        self._add(node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        """Remove it."""
        self._add(node, "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        """Remove it."""
        self._add(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        """Return nothing."""
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._add(node, "return None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        """Go on."""
        self._add(node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        """Stop."""
        self._add(node, "break")


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return every mutant of a module."""
    points = Points(path, source)
    points.visit(ast.parse(source))
    return points.mutants


def modules(tree: Path, room: str) -> list[str]:
    """Return the paths of a room's modules that people change."""
    found = sorted((tree / room).rglob("*.py"))
    return [str(path.relative_to(tree)) for path in found if "migrations" not in path.parts]


def draw(tree: Path, number: int, seed: int) -> list[Mutant]:
    """Draw mutants by a seed: from each room as its lines are many, from a line at most one."""
    lines = {
        room: sum(len((tree / path).read_bytes().splitlines()) for path in modules(tree, room))
        for room in ROOMS
    }
    drawn: list[Mutant] = []
    for room in ROOMS:
        candidates = [
            m for path in modules(tree, room) for m in mutants_of(path, (tree / path).read_bytes())
        ]
        candidates.sort(key=lambda mutant: _order(mutant, seed))
        share = round(number * lines[room] / sum(lines.values()))
        by_line: dict[tuple[str, int], Mutant] = {}
        for mutant in candidates:
            by_line.setdefault((mutant.path, mutant.lines[0]), mutant)
        drawn += [*by_line.values()][:share]
    return sorted(drawn, key=lambda mutant: _order(mutant, seed))


def _order(mutant: Mutant, seed: int) -> str:
    return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()


# ---------------------------------------------------------------- running tests in a worktree


class Worktree:
    """A checkout, and a Python that runs its tests, on the libraries of the one that runs this."""

    def __init__(self, folder: Path, commit: str, work: Path) -> None:
        # The repository's root is the package: its parent is where Python looks for it.
        self.tree = folder / "openenvd"
        git("worktree", "add", "--force", "--detach", str(self.tree), commit)
        venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        libraries = next((venv / "lib").glob("python*")) / "site-packages"
        installed = next(path for path in sys.path if path.endswith("site-packages"))
        (libraries / "mutants.pth").write_text(f"{folder}\n{installed}\n")
        # The names of sockets in it must stay short.
        self._temporary = tempfile.mkdtemp(prefix="m")
        path = f"{venv / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "TMPDIR": self._temporary, "HOME": self._temporary}
        with (folder / "output").open("wb") as output:
            self._server = subprocess.Popen(
                [venv / "bin" / "python", "-P", __file__, "--serve", folder, "--work", work],
                cwd=self.tree,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def run_tests(self, *arguments: str, measured: bool = False, limit: float) -> Run:
        """Run pytest with these arguments; leave no process behind."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps([arguments, measured, limit]), file=self._server.stdin, flush=True)
        run = Run(**json.loads(self._server.stdout.readline()))
        for left in Path(self._temporary).iterdir():
            shutil.rmtree(left, ignore_errors=True)
        return run

    def remove(self) -> None:
        """Remove the worktree."""
        self._server.communicate()
        shutil.rmtree(self._temporary, ignore_errors=True)
        git("worktree", "remove", "--force", str(self.tree))


@dataclasses.dataclass
class Run:
    """What a run of pytest did.

    Attributes:
        code: Its exit code; `None` if it was killed after the limit of time.
        seconds: How long each test took; without those that were skipped.
        failed: The tests that failed, the first one first.
        lines: If it was measured: module → line → the tests that execute it.
    """

    code: int | None
    seconds: dict[str, float]
    failed: list[str]
    lines: dict[str, dict[str, list[str]]]


def serve(folder: Path, kept: Path) -> None:
    """Run pytest for each line of standard input, in a fork that has imported all libraries.

    What outlives its parent becomes this process's child, and is killed after the run.
    """
    prctl_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(prctl_set_child_subreaper, 1)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    out = os.dup(1)
    os.dup2(2, 1)
    preload(kept)
    report = folder / "report"
    for line in sys.stdin:
        arguments, measured, limit = json.loads(line)
        report.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os._exit(run_pytest(arguments, Plugin(report, measured)))
        signal.setitimer(signal.ITIMER_REAL, limit)
        code = reap(child)
        signal.setitimer(signal.ITIMER_REAL, 0)
        kill_children()
        run = read_report(report, code)
        os.write(out, (json.dumps(dataclasses.asdict(run)) + "\n").encode())


def reap(child: int) -> int | None:
    """Wait for a child, and for every orphan that ends before it; `None`: it was killed."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def kill_children() -> None:
    """Kill all children until there are none: their orphans become ours."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def preload(kept: Path) -> None:
    """Import the libraries that tests import, so that no fork does; `kept` has their names."""
    if not kept.exists():
        child = os.fork()
        if not child:
            run_pytest(["--collect-only", *{name for tests in ROOMS.values() for name in tests}])
            found = [name for name in sys.modules if not name.startswith(("openenvd", "tests"))]
            kept.write_text("\n".join(found))
            os._exit(0)
        reap(child)
    for name in kept.read_text().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def run_pytest(arguments: list[str], *plugins: object) -> int:
    """Run pytest in this process."""
    import pytest

    options = ["-n", "0", "-q", "--no-header", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # as libraries are preloaded
    return int(pytest.main([*options, *arguments], plugins=plugins))


class Plugin:
    """Writes what each test does, and which lines it executes in this process."""

    def __init__(self, report: Path, measured: bool) -> None:
        self._report = report
        self._coverage: Any = None
        if measured:
            import coverage

            rooms = [str(Path(room).absolute() / "*") for room in ROOMS]
            self._coverage = coverage.Coverage(data_file=None, include=rooms, config_file=False)
            self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Attribute the lines that are executed from now on to a test."""
        if self._coverage:
            self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write what a test did."""
        self._write(report.nodeid, report.outcome, report.duration)

    def pytest_sessionfinish(self) -> None:
        """Write which lines were executed."""
        if self._coverage:
            self._coverage.stop()
            data = self._coverage.get_data()
            for path in data.measured_files():
                lines = data.contexts_by_lineno(path)
                self._write(str(Path(path).relative_to(Path.cwd())), "lines", lines)

    def _write(self, name: str, what: str, value: Any) -> None:
        with self._report.open("a") as file:
            file.write(json.dumps([name, what, value]) + "\n")


def read_report(path: Path, code: int | None) -> Run:
    """Return what the plug-in has written."""
    run = Run(code, {}, [], {})
    skipped = set()
    for line in path.read_text().splitlines() if path.exists() else ():
        name, what, value = json.loads(line)
        if what == "lines":
            run.lines[name] = value
            continue
        run.seconds[name] = run.seconds.get(name, 0.0) + value
        if what == "failed":
            run.failed.append(name)
        elif what == "skipped":
            skipped.add(name)
    for name in skipped:
        del run.seconds[name]
    return run


def git(*arguments: str) -> str:
    """Return what a git command prints."""
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


# ---------------------------------------------------------------- testing all drawn mutants


def measure_room(worktree: Worktree, room: str) -> Run:
    """Run a room's tests without a mutation, and note which lines each of them executes."""
    run = worktree.run_tests(*ROOMS[room], measured=True, limit=3600)
    for test in {*run.failed}:
        say(f"left out, as it fails without a mutation: {test}")
        run.seconds.pop(test, None)
    return run


def choose_tests(mutant: Mutant, measured: dict[str, Run]) -> list[str]:
    """Return the tests that may notice a mutant, the fastest of its own room first.

    They are those of any room that execute its lines, or all of its own where these lines run at
    import or in other processes.
    """
    chosen: dict[str, None] = {}
    for room in (mutant.room, *measured):
        found = measured[room]
        by_line = found.lines.get(mutant.path, {})
        names = {
            name
            for line in range(mutant.lines[0], mutant.lines[1] + 1)
            for name in by_line.get(str(line), ())
        } & found.seconds.keys()
        chosen |= dict.fromkeys(sorted(names, key=found.seconds.__getitem__))
    if chosen:
        return list(chosen)
    seconds = measured[mutant.room].seconds
    # Those first that are named as the module is.
    return sorted(seconds, key=lambda name: (Path(mutant.path).stem not in name, seconds[name]))


def try_mutant(mutant: Mutant, tests: list[str], worktree: Worktree) -> dict[str, Any]:
    """Run the tests that may notice a mutant, and return what happened."""
    started = time.monotonic()
    path = worktree.tree / mutant.path
    source = path.read_bytes()
    changed = mutant.apply(source)
    ast.parse(changed)
    old, new = source.decode().splitlines(), changed.decode().splitlines()
    diff = "\n".join(difflib.unified_diff(old, new, mutant.path, mutant.path, n=2, lineterm=""))
    status, by = SURVIVED, None
    try:
        path.write_bytes(changed)
        left = tests
        while left and status == SURVIVED:
            # A few first: most mutants are noticed by these, and few files need be imported.
            some = left[:FIRST_TESTS] if len(left) == len(tests) else left
            status, by = _run_until_failure(worktree, some)
            if status == KILLED and by is not None:
                # A failure by chance does not count: it fails again, or those behind it decide.
                status, _ = _run_until_failure(worktree, [by])
                some = some[: some.index(by) + 1] if by in some else some
            left = left[len(some) :]
    finally:
        path.write_bytes(source)
    seconds = round(time.monotonic() - started, 1)
    about = {"key": mutant.key, "line": mutant.lines[0], "diff": diff, "tests": len(tests)}
    return {**about, "status": status, "by": by, "seconds": seconds}


def _run_until_failure(worktree: Worktree, tests: list[str]) -> tuple[str, str | None]:
    options = ("-x", "--tb=no", f"--timeout={TEST_TIMEOUT_SECONDS}")
    run = worktree.run_tests(*options, *tests, limit=MAX_MUTANT_SECONDS)
    if run.code == USAGE_ERROR:  # a case of a table may have another name now
        tests = list(dict.fromkeys(name.partition("[")[0] for name in tests))
        run = worktree.run_tests(*options, *tests, limit=MAX_MUTANT_SECONDS)
    if run.code is None:
        return "hung", None
    # Without a failed test the module could not be imported.
    return (SURVIVED if run.code == 0 else KILLED), next(iter(run.failed), None)


def measure(
    kept: Path, rooms: list[str], worktrees: queue.SimpleQueue[Worktree], jobs: int
) -> dict[str, Run]:
    """Return what each room's tests execute, measured once for a commit."""
    found = {}
    for line in kept.read_text().splitlines() if kept.exists() else ():
        room, run = json.loads(line)
        found[room] = Run(**run)
    missing = [room for room in rooms if room not in found]
    with kept.open("a") as file:
        for room, run in in_worktrees(missing, measure_room, worktrees, jobs):
            if not run.seconds:
                raise RuntimeError(f"no test of {room} ran: pytest ended with code {run.code}")
            found[room] = run
            file.write(json.dumps([room, dataclasses.asdict(run)]) + "\n")
            file.flush()
            say(f"{room}: {len(run.seconds)} tests, {sum(run.seconds.values()):.0f} s")
    return found


def in_worktrees(
    items: list[Any], work: Any, worktrees: queue.SimpleQueue[Worktree], jobs: int
) -> Iterator[tuple[Any, Any]]:
    """Do work for each item in a worktree of its own; yield items with results."""

    def do(item: Any) -> tuple[Any, Any]:
        worktree = worktrees.get()
        try:
            return item, work(worktree, item)
        finally:
            worktrees.put(worktree)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            for done in concurrent.futures.as_completed([pool.submit(do, item) for item in items]):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def summarize(results: list[dict[str, Any]], reasons: dict[str, str]) -> float:
    """Print the survivors, and a line for each room; return the share of survivors."""
    counted = [result for result in results if result["key"] not in reasons]
    survivors = [result for result in counted if result["status"] == SURVIVED]
    for result in survivors:
        print(f"\nsurvived {result['tests']} tests: {result['key']}\n{result['diff']}")
    print(f"\n{'room':24}{'mutants':>9}{'equivalent':>12}{'survived':>10}")
    for room in ROOMS:
        own = [result for result in results if result["key"].startswith(f"{room}/")]
        same = sum(result["key"] in reasons for result in own)
        print(f"{room:24}{len(own):9}{same:12}{sum(r in survivors for r in own):10}")
    share = len(survivors) / max(1, len(counted))
    print(f"{len(survivors)} of {len(counted)} survived: {share:.1%}")
    return share


def say(text: str) -> None:
    """Tell what is being done."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--commit", default="HEAD", help="what is mutated and tested")
    parser.add_argument("--results", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "openenvd-mutants"
    )
    parser.add_argument("--room", choices=ROOMS, action="append", help="of this room alone")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--at-most", type=int, help="end after as many mutants; a later call continues"
    )
    parser.add_argument(
        "--again", choices=(SURVIVED, KILLED), help="try these again that have a result"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="print the mutants alone")
    parser.add_argument(
        "--allowed", type=float, default=0.08, help="share of survivors that is no failure"
    )
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.work / "modules")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # ends after the mutants that are being tried
        signal.signal(number, signal.default_int_handler)
    commit = git("rev-parse", options.commit)
    results = {}
    for line in options.results.read_text().splitlines() if options.results.exists() else ():
        results[json.loads(line)["key"]] = json.loads(line)
    reasons = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    options.work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="m-"))  # short, as sockets lie in it
    worktrees: queue.SimpleQueue[Worktree] = queue.SimpleQueue()
    made = []
    try:
        for number in range(options.jobs):
            made.append(Worktree(folder / str(number), commit, options.work))
            worktrees.put(made[-1])
        drawn = draw(made[0].tree, options.number, options.seed)
        if options.list:
            print(*(mutant.key for mutant in drawn), sep="\n")
            return 0
        waiting = [
            mutant
            for mutant in drawn
            if mutant.room in (options.room or ROOMS)
            and mutant.key not in reasons
            and (mutant.key not in results or results[mutant.key]["status"] == options.again)
        ]
        waiting = waiting[: options.at_most]
        kept = options.work / f"{commit}.jsonl"
        rooms = [room for room in ROOMS if any(mutant.room == room for mutant in waiting)]
        measured = measure(kept, rooms, worktrees, options.jobs)

        def work(worktree: Worktree, mutant: Mutant) -> dict[str, Any]:
            return try_mutant(mutant, choose_tests(mutant, measured), worktree)

        with options.results.open("a") as file:
            for mutant, result in in_worktrees(waiting, work, worktrees, options.jobs):
                results[mutant.key] = {**result, "commit": commit}
                file.write(json.dumps(results[mutant.key]) + "\n")
                file.flush()
                say(f"{result['status']} ({result['seconds']} s, {result['by']}): {mutant.key}")
    finally:
        for worktree in made:
            worktree.remove()
        shutil.rmtree(folder, ignore_errors=True)
    tried = [results[mutant.key] for mutant in drawn if mutant.key in results]
    return int(summarize(tried, reasons) > options.allowed)


if __name__ == "__main__":
    sys.exit(main())
