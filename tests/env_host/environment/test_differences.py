# SPDX-License-Identifier: Apache-2.0
"""What is read in a project's code, and told at the launch, of what several processes change."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from openenvd.env_host.environment.source_analysis import differences_of

from ..conftest import StartHost

ENVIRONMENT = """
import os, random, sys; [sys.modules.pop(name) for name in [*sys.modules] if 'email' in name]
from openenvd.env_host.bundled.echo.environment import EchoEnvironment

SCORES = {}

class Sample(EchoEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def step(self, action, **more):
        SCORES[action.message] = 1
        return super().step(action, **more)
"""


def told(source: str) -> list[str]:
    return list(differences_of(ast.parse(source), "env.py"))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("X = []\ndef f():\n    X.append(1)", "X"),
        ("X = {}\ndef f():\n    X['a'] = 1", "X"),
        ("X: dict = {}\ndef f():\n    del X['a']", "X"),
        ("X = 0\ndef f():\n    global X\n    X += 1", "X"),
        ("X = collections.defaultdict(int)\nasync def f():\n    X[1] += 1", "X"),
        ("class E:\n    n = 0\n    def f(self):\n        E.n += 1", "E.n"),
        ("class E:\n    n = []\n    def f(self):\n        self.n.append(1)", "n"),
        ("class E:\n    n = 0\n    @classmethod\n    def f(cls):\n        cls.n = 2", "cls.n"),
    ],
)
def test_a_function_that_changes_its_modules_or_classes_state_is_found(
    source: str, name: str
) -> None:
    [sentence] = told(source)
    assert f" changes {name}, which sessions share within a process alone" in sentence


@pytest.mark.parametrize(
    "source",
    [
        "X = []\nX.append(1)",  # at the import
        "X = []\ndef f():\n    return X[0]",
        "X = []\ndef f():\n    X = []\n    X.append(1)",
        "X = []\ndef f(X):\n    X.append(1)",
        "_CACHE = {}\ndef f():\n    _CACHE['a'] = 1",
        "class E:\n    n = []\n    def f(self):\n        self.n = []\n        self.n.append(1)",
        "class E:\n    n = 0\n    def f(self):\n        self.n += 1",
        "class O:\n    n = 0\nclass E:\n    def f(self):\n        self.n = 0",
        "def f():\n    random.seed(1)\n    os.getpid()",
    ],
)
def test_what_each_session_has_for_itself_is_not_taken_for_shared(source: str) -> None:
    assert told(source) == []


def test_seeds_and_pids_of_the_import_are_found() -> None:
    assert "seeds random" in told("import numpy\nnumpy.random.seed(1)")[0]
    assert "asks for the pid" in told("import os\nPID = os.getpid()")[0]


@pytest.mark.parametrize("how", [{"shards": 1}, {"shards": 2}, {"isolate": True}])
def test_a_launch_says_it_where_several_processes_serve(
    start: StartHost, tmp_path: Path, how: dict[str, object]
) -> None:
    (tmp_path / "shared_game.py").write_text(ENVIRONMENT)
    ready = start("shared_game:Sample", **how).ready()
    [sentence] = ready["differences"]
    assert sentence.startswith("shared_game.py:11 changes SCORES, ")
    assert ready.get("notes", []) == ([] if how == {"shards": 1} else [sentence])
