# SPDX-License-Identifier: Apache-2.0
"""What a rollout's folder costs by how many episodes it has; of two trees in one run.

    python -m load_tests.rollout_folder [--sizes 10 1000 100000]
        [--before PYTHON]      of a tree to compare with, where openenvd is installed
        [--datasets PYTHON]    one that has Hugging Face's `datasets`

Of each tree by turns: writing, closing, resuming, opening for reading, reading all totals, and
`datasets.load_dataset("json", …)` over the folder. A killed rollout leaves no more files than one
that has ended, but those of its last half second: resuming is measured after `close`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from load_tests.shared.report import Report, parse_arguments

WORK = Path(__file__).parent / "peers" / "folder_work.py"
SIZES = (10, 1_000, 100_000)
PATTERNS = {"after": "**/*.jsonl", "before": "steps-*.jsonl"}
FIGURES = ("write", "close", "resume", "open", "totals", "load")


def ask(python: str, *words: str, **variables: str) -> dict[str, float]:
    """One piece of work, in a process of its own."""
    environ = {**os.environ, **variables, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [python, str(WORK), *words], env=environ, cwd="/", check=True, stdout=subprocess.PIPE
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(
    report: Report, tree: str, python: str, datasets: str | None, episodes: int, repetitions: int
) -> None:
    """All figures of one tree and size."""
    values: dict[str, list[float]] = {name: [] for name in FIGURES}
    files = 0.0
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory(prefix="openenvd-folder-") as root:
            out = f"{root}/out"
            told = ask(python, "write", out, str(episodes)) | ask(python, "resume", out)
            if told["episodes"] != episodes:
                raise SystemExit(f"{tree}: {told['episodes']} of {episodes} episodes exist")
            told |= ask(python, "read", out)
            files = told["files"]
            if datasets is not None:
                home = {"HF_HOME": f"{root}/home", "HF_HUB_OFFLINE": "1"}
                loaded = ask(datasets, "datasets", f"{out}/{PATTERNS[tree]}", f"{root}/c", **home)
                if loaded["steps"] != told["steps"]:
                    raise SystemExit(f"{tree}: {loaded['steps']} of {told['steps']} steps loaded")
                told["load"] = loaded["load"]
        for name in FIGURES:
            values[name] += [told[name]] if name in told else []
    for name, seconds in values.items():
        if seconds:
            report.add(f"{episodes:,} episodes, {tree}: {name}", "s", seconds)
    report.add(f"{episodes:,} episodes, {tree}: files", "", [files])


def main() -> int:
    """All sizes, of both trees."""
    options: Any = parse_arguments(
        "Folders of rollouts.",
        repetitions=3,
        sizes={"nargs": "+", "type": int, "default": list(SIZES), "help": "episodes"},
        before={"help": "the Python of an earlier tree"},
        datasets={"help": "a Python with Hugging Face's datasets"},
    )
    report = Report("Folders of rollouts")
    trees = {"before": options.before, "after": sys.executable}
    for episodes in options.sizes:
        for tree, python in trees.items():
            if python is not None:
                measure(report, tree, python, options.datasets, episodes, options.repetitions)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
