# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: which small defects in the core would no test notice?

    python .ci/mutants.py --number 200 --seed 28 --results mutants.jsonl
    python .ci/mutants.py --list                     # what would be drawn

Edits worktrees in a folder for temporary files, never the checkout. One run of a room's tests with
`pytest-cov` shows which of them execute a line; a mutant runs those, the fastest first, until one
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
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
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
MAX_ROOM_SECONDS = 3600
SURVIVED, KILLED, HUNG = "survived", "killed", "hung"
PR_SET_CHILD_SUBREAPER = 36

# ---------------------------------------------------------------- generating mutants

PAIRS = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.FloorDiv),
)
OPERATORS: dict[Any, Any] = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
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


def changes_of(  # noqa: C901  # a case for each kind of node
    node: Any,
) -> Iterator[tuple[Any, ast.AST | str]]:
    """Each place in this node that is replaced, and by what."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                yield test, test.operand
            elif not isinstance(test, ast.Compare):  # whose operator is changed
                yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Compare():
            for index, op in enumerate(node.ops):
                ops = [*node.ops[:index], OPERATORS[type(op)](), *node.ops[index + 1 :]]
                yield node, ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp():
            yield node, ast.BoolOp(OPERATORS[type(node.op)](), node.values)
        case ast.BinOp(left=left, right=right) if type(node.op) in OPERATORS:
            if not is_text(left) and not is_text(right):
                yield node, ast.BinOp(left, OPERATORS[type(node.op)](), right)
        case ast.Constant(value=bool() as value):
            yield node, repr(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, repr(value + 1)
        case ast.Constant(value=str() as value) if len(value.split()) == 1:  # a name
            yield node, repr(f"{value}X")
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            yield node, "pass"
        case ast.Assign(targets=targets):  # without a local name the code would not even run
            if not any(isinstance(target, ast.Name | ast.Tuple) for target in targets):
                yield node, "pass"
        case ast.AugAssign() | ast.Delete() | ast.Raise():
            yield node, "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, "return None"
        case ast.Break():
            yield node, "continue"
        case ast.Continue():
            yield node, "break"


def is_text(node: ast.expr) -> bool:
    """Whether strings are joined here."""
    is_bytes_or_str = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr) or is_bytes_or_str


def is_left_alone(node: Any) -> bool:
    """Whether nothing in it is changed: messages, log lines, and what only type checkers see.

    Python 3.11 gives no positions of an f-string's parts.
    """
    match node:
        case ast.JoinedStr() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name in LOGGING
        case ast.If(test=ast.Name(id=name)):
            return name == "TYPE_CHECKING"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name in UNSEEN_FUNCTIONS
    return False


def parts_of(node: Any) -> Iterable[ast.AST]:
    """What of a node is looked at in turn: no annotations, decorators and targets."""
    match node:
        case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
            defaults = [*args.defaults, *args.kw_defaults]
            return [*(default for default in defaults if default is not None), *node.body]
        case ast.ClassDef(body=body):
            return body
        case ast.Assign(value=value) | ast.AnnAssign(value=value) | ast.AugAssign(value=value):
            return [value] if value is not None else []
        case ast.Raise() | ast.Delete():
            return []
    return ast.iter_child_nodes(node)


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of a module."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: collections.Counter[tuple[str, ...]] = collections.Counter()
    found = []

    def visit(node: Any, names: tuple[str, ...], lines: tuple[int, int]) -> None:
        if is_left_alone(node):
            return
        if isinstance(node, ast.stmt):  # its lines, or those of its head
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            lines = (node.lineno, max(node.lineno, last))
        for place, change in changes_of(node):
            after = change if isinstance(change, str) else ast.unparse(change)
            if isinstance(place, ast.expr) and not isinstance(place, ast.Constant):
                after = f"({after})"
            same = (".".join(names), ast.unparse(place), after)
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            found.append(Mutant(path, *same, seen[same], lines, (start, end)))
            seen[same] += 1
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
        for part in parts_of(node):
            visit(part, names, lines)

    visit(ast.parse(source), (), (1, 1))
    return found


def draw(tree: Path, number: int, seed: int) -> list[Mutant]:
    """Draw mutants by a seed: from each room as its lines are many, from a line at most one."""

    def order(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    sources = {
        room: {
            str(path.relative_to(tree)): path.read_bytes()
            for path in sorted((tree / room).rglob("*.py"))
        }
        for room in ROOMS
    }
    lines = {r: sum(len(s.splitlines()) for s in found.values()) for r, found in sources.items()}
    drawn: list[Mutant] = []
    for room, found in sources.items():
        by_line: dict[tuple[str, int], Mutant] = {}
        mutants = [m for path, source in found.items() for m in mutants_of(path, source)]
        for mutant in sorted(mutants, key=order):
            by_line.setdefault((mutant.path, mutant.lines[0]), mutant)
        drawn += [*by_line.values()][: round(number * lines[room] / sum(lines.values()))]
    return sorted(drawn, key=order)


# ---------------------------------------------------------------- running tests in a worktree


@dataclasses.dataclass
class Run:
    """What a run of pytest did; the cases of a table are one test.

    Attributes:
        code: Its exit code; `None` if it was killed after the limit of time.
        failed: The tests that failed, the first one first.
        seconds: How long each test took.
    """

    code: int | None
    failed: list[str]
    seconds: dict[str, float]


class Worktree:
    """A checkout, and a Python that runs its tests, on the libraries of the one that runs this."""

    def __init__(self, folder: Path, commit: str) -> None:
        # The repository's root is the package: its parent is where Python looks for it.
        self.tree = folder / "openenvd"
        git("worktree", "add", "--force", "--detach", str(self.tree), commit)
        venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        libraries = next((venv / "lib").glob("python*")) / "site-packages"
        installed = next(path for path in sys.path if path.endswith("site-packages"))
        (libraries / "mutants.pth").write_text(f"{folder}\n{installed}\n")
        self._python = venv / "bin" / "python"
        self._path = f"{venv / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run_tests(self, *arguments: str, limit: float) -> Run:
        """Run pytest with these arguments; leave no process behind."""
        # The names of sockets in it must stay short.
        with tempfile.TemporaryDirectory(prefix="m", ignore_cleanup_errors=True) as home:
            env = {**os.environ, "PATH": self._path, "TMPDIR": home, "HOME": home}
            command = [str(self._python), "-P", __file__, "--alone", str(limit), *arguments]
            done = subprocess.run(
                command, check=False, cwd=self.tree, env=env, capture_output=True, text=True
            )
        seconds: dict[str, float] = collections.defaultdict(float)
        for took, name in re.findall(r"^([\d.]+)s \w+ +([^\s[]+)", done.stdout, re.MULTILINE):
            seconds[name] += float(took)
        failed = re.findall(r"^(?:FAILED|ERROR) ([^\s[]+::[^\s[]+)", done.stdout, re.MULTILINE)
        return Run(done.returncode if done.returncode >= 0 else None, failed, dict(seconds))

    def remove(self) -> None:
        """Remove the worktree."""
        git("worktree", "remove", "--force", str(self.tree))


def run_alone(limit: float, arguments: list[str]) -> int:
    """Run pytest as a child; kill it after its time, and then all that it has left behind."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what it leaves becomes ours
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rfE", "--durations=0"]
    command += ["--durations-min=0", "-vv", "--no-header", "-p", "no:cacheprovider", *arguments]
    tests = subprocess.Popen(command)
    signal.signal(signal.SIGALRM, lambda *_: tests.kill())
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        pid = 0
        while pid != tests.pid:  # tests wait until orphans of theirs are gone
            pid, status = os.waitpid(-1, 0)
        return os.waitstatus_to_exitcode(status)
    finally:
        with contextlib.suppress(ChildProcessError):
            while True:
                children = Path("/proc/self/task", str(os.getpid()), "children").read_text()
                for child in children.split():
                    os.kill(int(child), signal.SIGKILL)
                os.waitpid(-1, 0)


def git(*arguments: str) -> str:
    """What a git command prints."""
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


# ---------------------------------------------------------------- testing all drawn mutants


@dataclasses.dataclass
class Measured:
    """Of a room's tests: the seconds of each, and module → line → those that execute it."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]


def measure_room(worktree: Worktree, room: str) -> Measured:
    """Run a room's tests without a mutation, and note which lines each of them executes."""
    import coverage

    data = worktree.tree / ".coverage"
    covered = [f"--cov={one}" for one in ROOMS]
    run = worktree.run_tests(
        *(*covered, "--cov-context=test", "--cov-report=", *ROOMS[room]), limit=MAX_ROOM_SECONDS
    )
    if not run.seconds:
        raise RuntimeError(f"no test of {room} ran: pytest ended with code {run.code}")
    for test in {*run.failed}:
        say(f"left out, as it fails without a mutation: {test}")
        run.seconds.pop(test, None)
    found = coverage.CoverageData(str(data))
    found.read()
    lines = {
        str(Path(path).relative_to(worktree.tree)): {
            line: sorted({re.split(r"[|[]", name)[0] for name in names} & run.seconds.keys())
            for line, names in found.contexts_by_lineno(path).items()
        }
        for path in found.measured_files()
    }
    data.unlink()
    say(f"{room}: {len(run.seconds)} tests, {sum(run.seconds.values()):.0f} s")
    return Measured(run.seconds, lines)


def choose_tests(mutant: Mutant, measured: dict[str, Measured]) -> list[str]:
    """The tests that may notice a mutant, the fastest of its own room first.

    They are those of any room that execute its lines, or all of its own where these lines run at
    import or in other processes.
    """
    chosen: dict[str, None] = {}
    for room in (mutant.room, *measured):
        by_line, seconds = measured[room].lines.get(mutant.path, {}), measured[room].seconds
        lines = range(mutant.lines[0], mutant.lines[1] + 1)
        names = {name for line in lines for name in by_line.get(line, ())}
        chosen |= dict.fromkeys(sorted(names, key=seconds.__getitem__))
    seconds = measured[mutant.room].seconds
    # Those first that are named as the module is.
    every = sorted(seconds, key=lambda name: (Path(mutant.path).stem not in name, seconds[name]))
    return list(chosen) or every


def try_mutant(mutant: Mutant, tests: list[str], worktree: Worktree) -> dict[str, Any]:
    """Run the tests that may notice a mutant, and return what happened."""
    path = worktree.tree / mutant.path
    source = path.read_bytes()
    changed = mutant.apply(source)
    old, new = source.decode().splitlines(), changed.decode().splitlines()
    diff = "\n".join(difflib.unified_diff(old, new, mutant.path, mutant.path, n=2, lineterm=""))
    status, by, left = SURVIVED, "", tests
    try:
        path.write_bytes(changed)
        while left and status == SURVIVED:
            status, by = _run_until_failure(worktree, left)
            if by not in left:
                break
            # A failure counts if the test fails again; otherwise the tests after it decide.
            status, _ = _run_until_failure(worktree, [by])
            left = left[left.index(by) + 1 :]
    finally:
        path.write_bytes(source)
    about = {"key": mutant.key, "line": mutant.lines[0], "diff": diff, "tests": len(tests)}
    return {**about, "status": status, "by": by}


def _run_until_failure(worktree: Worktree, tests: list[str]) -> tuple[str, str]:
    options = ("-x", "--tb=no", f"--timeout={TEST_TIMEOUT_SECONDS}")
    run = worktree.run_tests(*options, *tests, limit=MAX_MUTANT_SECONDS)
    if run.code is None:
        return HUNG, ""
    # Without a failed test the module could not be imported.
    return (SURVIVED if run.code == 0 else KILLED), next(iter(run.failed), "")


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
    print(f"\n{'room':24}{'mutants':>9}{'survived':>10}")
    for room in ROOMS:
        own = [result for result in counted if result["key"].startswith(f"{room}/")]
        print(f"{room:24}{len(own):9}{sum(r in survivors for r in own):10}")
    share = len(survivors) / max(1, len(counted))
    print(f"{len(survivors)} of {len(counted)} survived: {share:.1%}")
    return share


def say(text: str) -> None:
    """Tell what is being done."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--number", type=int, default=200, help="how many mutants")
    add("--seed", type=int, default=28)
    add("--results", type=Path, default=Path("mutants.jsonl"))
    add("--jobs", type=int, default=2)
    add("--list", action="store_true", help="print the mutants alone")
    add("--allowed", type=float, default=0.08, help="share of survivors that is no failure")
    options = parser.parse_args()
    # At SIGTERM the campaign ends once the mutants that are being tried have ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    drawn = draw(ROOT, options.number, options.seed)
    if options.list:
        print(*(mutant.key for mutant in drawn), sep="\n")
        return 0
    kept = options.results.read_text().splitlines() if options.results.exists() else []
    results = {result["key"]: result for result in map(json.loads, kept)}
    reasons = json.loads(EQUIVALENT.read_text())
    waiting = [m for m in drawn if m.key not in reasons and m.key not in results]
    folder = Path(tempfile.mkdtemp(prefix="m-"))  # short, as sockets lie in it
    folder.chmod(0o755)  # tests that become another user import what is in it
    worktrees: queue.SimpleQueue[Worktree] = queue.SimpleQueue()
    made = []
    try:
        for number in range(options.jobs):
            made.append(Worktree(folder / str(number), git("rev-parse", "HEAD")))
            worktrees.put(made[-1])
        rooms = [room for room in ROOMS if any(mutant.room == room for mutant in waiting)]
        measured = dict(in_worktrees(rooms, measure_room, worktrees, options.jobs))

        def work(worktree: Worktree, mutant: Mutant) -> dict[str, Any]:
            return try_mutant(mutant, choose_tests(mutant, measured), worktree)

        with options.results.open("a") as file:
            for mutant, result in in_worktrees(waiting, work, worktrees, options.jobs):
                results[mutant.key] = result
                print(json.dumps(result), file=file, flush=True)
                say(f"{result['status']} ({result['by']}): {mutant.key}")
    finally:
        for worktree in made:
            worktree.remove()
        shutil.rmtree(folder, ignore_errors=True)
    tried = [results[mutant.key] for mutant in drawn if mutant.key in results]
    return int(summarize(tried, reasons) > options.allowed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:
        sys.exit(run_alone(float(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
