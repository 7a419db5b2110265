# SPDX-License-Identifier: Apache-2.0
"""What a change has touched: which engines' suites run, and which tests `.ci/run quick` runs.

    python .ci/touched.py engines    an engine whose code or tests have changed
    python .ci/touched.py tests      the test files for a quick answer

Changed is what differs from a base: the commit that `OPENENVD_CI_BASE` names; for tests on a
branch, where it left main; otherwise the newest commit that is a day older than the one checked
out. What is not committed counts. Where there is no such commit (a shallow clone, no git),
everything counts as changed. Where several engines have changed, the commit's hash draws one, and
the others wait for the long form. What was decided, and why, is on standard error.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
# Whose suites run where a path begins with one of these; swarm stands on Docker.
ENGINES = {
    "docker": ("docker",),
    "swarm": ("docker", "swarm"),
    "slurm": ("slurm",),
}
ENGINES_CODE = ("environments/engines/", "environments/agent/")
ENGINES_SMOKE_TESTS = ("smoke_tests/engines/", "smoke_tests/engines/test_")
IMAGES = ("environments/preparation/", "smoke_tests/engines/test_images")
# What every engine stands on, and the suite that all of them have in common.
ALL_ENGINES = ("smoke_tests/providers/", "smoke_tests/conftest.py", "environments/replica_stat")
OTHER_ENGINES = ("local", "ray", "kubernetes")  # have stages of the long form
# What all test files depend on.
EVERYTHING = ("pyproject.toml", "tests/conftest.py", ".ci/")
ALWAYS = "repository"  # holds what the pages, the packages and the sizes are to be
# About three minutes on two cores; what is beyond it is left to the whole run.
QUICK_LINES = 18_000
DAY_SECONDS = 24 * 3600


def git(*arguments: str, root: Path = ROOT) -> str:
    """Return what a git command prints; empty where it fails, or git is missing."""
    # A checkout may belong to another user than root, who runs this.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def find_base(*, on_branch: bool, root: Path = ROOT) -> str:
    """Return the commit that a change is measured from; empty: there is none."""
    if named := os.environ.get("OPENENVD_CI_BASE"):
        return git("rev-parse", "--verify", "--quiet", f"{named}^{{commit}}", root=root)
    head = git("rev-parse", "HEAD", root=root)
    if on_branch:
        for main in ("origin/main", "main"):
            left_at = git("merge-base", "HEAD", main, root=root)
            if left_at not in ("", head):
                return left_at
    if not (committed_at := git("log", "-1", "--format=%ct", root=root)):
        return ""
    before = int(committed_at) - DAY_SECONDS
    return git("rev-list", "-1", "--first-parent", f"--before={before}", "HEAD", root=root)


def changed_paths(base: str, root: Path = ROOT) -> set[str]:
    """Return the paths that differ from a commit, with those that are not committed."""
    changed = git("diff", "--name-only", "--no-renames", base, "--", root=root)
    untracked = git("ls-files", "--others", "--exclude-standard", root=root)
    return {*changed.splitlines(), *untracked.splitlines()}


def touched_engines(changed: set[str]) -> list[str]:
    """Return the engines whose suites run when these paths have changed."""
    found = set()
    for path in changed:
        if path.startswith(ALL_ENGINES):
            found |= {*ENGINES}
        if path.startswith(IMAGES):
            found |= {"docker", "swarm"}
        if path.startswith(ENGINES_CODE):
            rest = PurePosixPath(*PurePosixPath(path).parts[2:]).as_posix()
            own = _engines_named(rest)
            found |= own or ({*ENGINES} if not rest.startswith(OTHER_ENGINES) else set())
        for folder in ENGINES_SMOKE_TESTS:
            found |= _engines_named(path.removeprefix(folder)) if path.startswith(folder) else set()
    return [engine for engine in ENGINES if engine in found]


def _engines_named(text: str) -> set[str]:
    return {engine for engine, beginnings in ENGINES.items() if text.startswith(beginnings)}


def draw(engines: list[str], seed: int) -> list[str]:
    """Return one of these engines, drawn by a seed; an empty list if there are none."""
    return engines and [random.Random(seed).choice(engines)]


def importers_of(rooms: set[str]) -> set[str]:
    """Return the rooms with a module that imports one of these rooms."""
    import grimp

    graph = grimp.build_graph("openenvd", cache_dir=None)
    arrows = {
        (_room_of(importer), _room_of(imported))
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    }
    return {importer for importer, imported in arrows if imported in rooms} - rooms


def _room_of(module: str) -> str:
    return f"{module}.".split(".")[1]


def choose(first: list[Path], later: list[list[Path]], lines: int, seed: int) -> list[Path]:
    """Return the first files, and files of the later groups up to a total number of lines.

    Args:
        first: Files that are chosen in any case.
        later: Groups in the order in which they matter; each is shuffled by the seed.
        lines: How many lines of tests run, with those of the first files.
        seed: Of the order within a group.
    """
    chosen = dict.fromkeys(first)
    left = lines - sum(map(_lines, chosen))
    for group in later:
        rest = [path for path in group if path not in chosen]
        random.Random(seed).shuffle(rest)
        for path in rest:
            if (size := _lines(path)) <= left:
                chosen[path] = None
                left -= size
    return sorted(chosen)


def _lines(path: Path) -> int:
    return path.read_text().count("\n")


def test_files(changed: set[str] | None) -> list[Path]:
    """Return the test files that `.ci/run quick` runs; `None`: everything has changed."""
    every = sorted((ROOT / "tests").rglob("test_*.py"))
    by_room: dict[str, list[Path]] = {}
    for path in every:
        by_room.setdefault(path.relative_to(ROOT / "tests").parts[0], []).append(path)
    own = [path for path in every if path.relative_to(ROOT).as_posix() in (changed or ())]
    rooms = {PurePosixPath(path).parts[0] for path in changed or ()}
    rooms |= {PurePosixPath(path).parts[1] for path in changed or () if path.startswith("tests/")}
    rooms &= by_room.keys()
    others = importers_of(rooms)
    if changed is None or any(path.startswith(EVERYTHING) for path in changed):
        others = by_room.keys() - rooms
    later = [
        [path for room in sorted(group) for path in by_room.get(room, [])]
        for group in (rooms, others)
    ]
    chosen = choose(by_room.get(ALWAYS, []), [own, *later], QUICK_LINES, seed())
    candidates = {*own, *later[0], *later[1]}
    say(f"rooms touched: {', '.join(sorted(rooms)) or 'none'}")
    say(f"rooms that import them: {', '.join(sorted(others & by_room.keys())) or 'none'}")
    left_out = len(candidates - {*chosen})
    say(f"{len(chosen)} files of tests; {left_out} of these rooms left out (seed {seed()})")
    return chosen


def seed() -> int:
    """Return a number that differs from commit to commit."""
    return int(git("rev-parse", "--short=7", "HEAD") or "0", 16)


def say(text: str) -> None:
    """Explain a decision."""
    print(text, file=sys.stderr)


def main() -> int:
    """Print what the argument asks for."""
    what = sys.argv[1]
    base = find_base(on_branch=what == "tests")
    changed = changed_paths(base) if base else None
    say(f"changed since: {base or 'there is no earlier commit here: everything counts'}")
    if what == "engines":
        engines = [*ENGINES] if changed is None else touched_engines(changed)
        say(f"engines touched: {', '.join(engines) or 'none'}; one is drawn (seed {seed()})")
        print(*draw(engines, seed()))
        return 0
    print(*(path.relative_to(ROOT) for path in test_files(changed)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
