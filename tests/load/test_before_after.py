# SPDX-License-Identifier: Apache-2.0
"""`load_tests/before_after.py`: trees take turns, what is known is kept, and a bound is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = """#!/bin/sh
echo "{name}" >> "{log}"
while [ "$1" != --json ]; do shift; done
echo '{{"measures": [{{"name": "one at a time, p50", "values": [{value}]}}]}}' > "$2"
"""


def make_tree(folder: Path, name: str, value: float) -> Path:
    """A checkout whose Python measures one value at once."""
    tree = folder / name
    python = tree / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(name=name, log=folder / "log", value=value))
    python.chmod(0o755)
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message=one"]):
        subprocess.run([*git, *words], check=True)
    return tree


def compare(
    monkeypatch: pytest.MonkeyPatch, before: Path, after: Path, times: int, path: Path
) -> int:
    from load_tests.before_after import main

    words = ["--before", str(before), "--after", str(after), "--json", str(path)]
    words += ["--only", "short_requests", "--repetitions", str(times)]
    monkeypatch.setattr(sys, "argv", ["before_after", *words])
    return main()


def test_trees_take_turns_and_a_later_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = make_tree(tmp_path, "old", 4.0), make_tree(tmp_path, "new", 5.0)
    path = tmp_path / "kept.json"
    assert compare(monkeypatch, before, after, 2, path) == 0
    assert (tmp_path / "log").read_text().split() == ["old", "new", "new", "old"]
    assert len(json.loads(path.read_text())["runs"]) == 4
    assert compare(monkeypatch, before, after, 3, path) == 0
    assert (tmp_path / "log").read_text().split()[4:] == ["old", "new"]
    row = capsys.readouterr().out.splitlines()[-1]
    expected = "SHORT request, P50, ms 4 (4 to 4) 5 (5 to 5) 1.250 <= 6 yes"
    assert " ".join(row.split()) == expected


def test_a_bound_that_does_not_hold_and_a_figure_that_is_not_there_are_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = make_tree(tmp_path, "old", 4.0), make_tree(tmp_path, "new", 7.0)
    assert compare(monkeypatch, before, after, 1, tmp_path / "kept.json") == 1
    assert capsys.readouterr().out.endswith("NO\n")
    (after / ".venv" / "bin" / "python").write_text("#!/bin/sh\necho oh no; exit 3\n")
    assert compare(monkeypatch, before, after, 1, tmp_path / "other.json") == 1
    out = capsys.readouterr().out
    assert "exit code 3: oh no" in out
    assert out.endswith("NOT MEASURED\n")
