# SPDX-License-Identifier: Apache-2.0
"""Measures the structure of the repository: sizes, large classes, crowded folders, wording.

    python tests/repository/house.py

`test_house.py` holds bounds for these figures. Nothing of the repository is imported: files are
read, and parsed by `ast`. What git does not track does not count; where there is no git checkout (a
source distribution), every file counts but those that `.gitignore` names.
"""

import ast
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Not in the wheel; all else is.
OUTSIDE = {
    *("tests", "load_tests", "smoke_tests", "examples", "docs"),
    *(".ci", ".github", ".types"),
}
TESTS = {"tests", "load_tests", "smoke_tests"}
SHIPPED_SUFFIXES = {".py", ".js", ".css", ".html"}
LARGE_CLASS_LINES, LARGE_CLASS_METHODS = 300, 25
CROWDED_FOLDER_MODULES = 18
# Words that the field does not use for these things, or that make a sentence hard to read.
DIALECT_WORDS = (
    *("told", "nobody", "whoever", "somebody", "anew", "for ever", "goes on", "what becomes of"),
    *("hindrance", r"insistent\w*", r"obey\w*", "called off", "calls? off", "mend(?:s|ed)?"),
    *("so many", "beats", "lull", "let go", "is to be"),
)
PRIVATE_NAMES = (
    *(r"MOST_\w+", r"LEAST_\w+", r"FEWEST_\w*", r"LONGEST_\w*", r"\w*_LOOK\w*", r"LOOK_\w+"),
    *("added_by", "in_place_of", "Lull", "Lobby", "ReplicaDoors?"),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(root: Path = ROOT) -> list[Path]:
    # A checkout may belong to another user than root, who runs this.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z"]
    if (root / ".git").exists():
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = [Path(name) for name in listed.split("\0") if name]
    else:
        found = list(_walk(root))
    return sorted(path for path in found if (root / path).is_file())


def copy_files(target: Path, root: Path = ROOT) -> None:
    """Copy the files that count; links stay links."""
    for path in files(root):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / path, target / path, follow_symlinks=False)


def _walk(root: Path) -> Iterator[Path]:
    ignored = [line.strip("/") for line in (root / ".gitignore").read_text().split()]
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        if not any(fnmatch(part, pattern) for part in relative.parts for pattern in ignored):
            yield relative


@cache
def measure(root: Path = ROOT) -> dict[str, int]:
    paths = files(root)
    shipped = [p for p in paths if p.suffix in SHIPPED_SUFFIXES and p.parts[0] not in OUTSIDE]
    modules = {p: _read(root / p) for p in shipped if p.suffix == ".py"}
    texts = [*modules.values(), *(_read(root / p) for p in shipped if p not in modules)]
    trees = {path: ast.parse(text) for path, text in modules.items()}
    pages = [p for p in paths if p.suffix == ".md" and p.name != "CHANGELOG.md"]
    decisions = [page for page in pages if "decisions" in page.parts]
    tests = [p for p in paths if p.suffix == ".py" and p.parts[0] in TESTS]
    return {
        "shipped lines": sum(text.count("\n") for text in texts),
        "code lines": sum(_code_lines(text, trees[path]) for path, text in modules.items()),
        "modules": len(modules),
        "test lines": sum(_read(root / path).count("\n") for path in tests),
        "words of pages": _words(root, set(pages) - set(decisions)),
        "words of decisions": _words(root, decisions),
        "folders at the root": len(
            {p.parts[0] for p in paths if p.parts[1:] and p.parts[0][0] != "."}
        ),
        "large classes": len(large_classes(trees)),
        "crowded folders": len(crowded_folders(paths)),
        "dialect words": sum(_count(DIALECT_WORDS, text, re.IGNORECASE) for text in texts),
        "private names": sum(_count(PRIVATE_NAMES, text) for text in texts),
    }


def large_classes(trees: dict[Path, ast.Module]) -> list[str]:
    """Return the classes with too many lines or methods, as `path:Class`."""
    return [
        f"{path}:{node.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and (
            len(range(node.lineno, node.end_lineno or 0)) >= LARGE_CLASS_LINES
            or sum(isinstance(part, Function) for part in node.body) > LARGE_CLASS_METHODS
        )
    ]


def crowded_folders(paths: list[Path]) -> list[str]:
    modules = (path for path in paths if path.suffix == ".py" and path.parts[0] != ".types")
    counts = Counter(str(path.parent) for path in modules)
    return [folder for folder, count in counts.items() if count > CROWDED_FOLDER_MODULES]


def _code_lines(text: str, tree: ast.Module) -> int:
    """Count the lines that are neither blank, nor a comment, nor a docstring's."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            left_out.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = ((n, line.strip()) for n, line in enumerate(text.split("\n"), 1))
    return sum(bool(line) and line[0] != "#" and n not in left_out for n, line in lines)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _words(root: Path, pages: set[Path] | list[Path]) -> int:
    return sum(len(_read(root / page).split()) for page in pages)


def _count(words: tuple[str, ...], text: str, flags: int = 0) -> int:
    return len(re.findall(rf"\b(?:{'|'.join(words)})\b", text, flags))


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{value:8,}  {name}")
