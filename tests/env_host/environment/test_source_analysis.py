# SPDX-License-Identifier: Apache-2.0
"""What is read in the code of an environment: bound to a thread, or shared by processes."""

import ast
import importlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from openenvd.env_host.environment.definition import AnyAction, Definition, class_made_by
from openenvd.env_host.environment.source_analysis import differences_of, is_bound_to_thread

from ..conftest import StartHost

CLASS = "\nclass Made:\n    def step(self, action):\n        {}\n"
_numbers = count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package, whose modules are imported by the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / f"project_{next(_numbers)}"
    folder.mkdir()
    (folder / "__init__.py").write_text("import threading\n")  # not a part of the class's code
    yield folder
    importlib.invalidate_caches()


def made_by(package: Path, head: str, body: str = "return 1") -> type:
    (package / "env.py").write_text(head + CLASS.format(body))
    made: type = importlib.import_module(f"{package.name}.env").Made
    return made


@pytest.mark.parametrize(
    "head",
    [
        "",
        "import json, random\nfrom uuid import uuid4",
        "from pydantic import BaseModel",
        "from openenvd.env_host.environment.interfaces import Environment",
        "try:\n    from .models import Model\nexcept ImportError:\n    from models import Model",
        "from . import models",
        "from .models import Model\nfrom .circle import Other",
        "try:\n    import a_module_that_is_not_there\nexcept ImportError:\n    pass",
    ],
)
def test_plain_code_runs_on_any_thread(package: Path, head: str) -> None:
    (package / "models.py").write_text("import math\nclass Model:\n    size = math.pi\n")
    (package / "circle.py").write_text("from . import circle\nclass Other:\n    pass\n")
    assert not is_bound_to_thread(made_by(package, head))


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("import sqlite3", "return 1"),
        ("import threading as t", "return 1"),
        ("from contextvars import ContextVar", "return 1"),
        ("import json, asyncio", "return 1"),
        ("", "import sqlite3"),
        ("", "import a_module_that_may_come"),
        ("", "return eval('1')"),
        ("", "return __import__('threading')"),
        ("from .models import Model", "return 1"),
        ("from . import models", "return 1"),
        ("from .models import *", "return 1"),
        ("import _queue", "return 1"),
    ],
)
def test_code_that_imports_what_may_be_bound_stays_on_its_thread(
    package: Path, head: str, body: str
) -> None:
    (package / "models.py").write_text("import threading\nclass Model:\n    pass\n")
    assert is_bound_to_thread(made_by(package, head, body))


def test_base_classes_and_a_class_that_is_not_thread_safe_count(package: Path) -> None:
    (package / "base.py").write_text("import threading\nclass Base:\n    pass\n")
    base = importlib.import_module(f"{package.name}.base").Base
    made = made_by(package, "")
    assert is_bound_to_thread(type("Both", (made, base), {"__module__": made.__module__}))
    assert not is_bound_to_thread(made)
    assert is_bound_to_thread(type("Own", (made,), {"THREAD_SAFE": False}))


DECLARED: dict[str, object] = {"REQUIRES_SINGLE_THREAD_EXECUTOR": True}


@pytest.mark.parametrize(
    ("factory", "may_change"),
    [
        ({}, True),
        (DECLARED, False),
        ({**DECLARED, "THREAD_SAFE": True}, False),
        ({"THREAD_SAFE": True, "__module__": "nowhere"}, True),
        ({"__module__": "nowhere"}, False),
        (lambda: object(), False),
    ],
    ids=["nothing", "one thread", "one, and safe", "safe, no source", "no source", "no class"],
)
def test_what_a_class_declares_comes_first_and_a_function_declares_nothing(
    factory: Any, may_change: bool
) -> None:
    if isinstance(factory, dict):
        factory = type("Made", (), {"__module__": "uuid", **factory})
    made = Definition("made", factory, AnyAction, AnyAction, AnyAction, AnyAction)
    assert made.may_change_threads is may_change


def test_code_of_any_depth_can_be_read_and_of_any_length_counts_as_bound(package: Path) -> None:
    branches = "".join(f"elif action == {n}: return {n}\n        " for n in range(1500))
    made = made_by(package, "", f"if action is None: return 0\n        {branches}")
    assert not is_bound_to_thread(made)
    (package / "models.py").write_text(f"WORDS = {['word'] * 60_000}\nclass Model:\n    pass\n")
    models = importlib.import_module(f"{package.name}.models")
    assert is_bound_to_thread(models.Model)


GUARDED = "try:\n    from ..models import Model\nexcept ImportError:\n    Model = dict"


@pytest.mark.parametrize(
    "head",
    [
        GUARDED,
        "try:\n    from .models import Model\nexcept ImportError:\n    Model = dict",
        "try:\n    from . import models\nexcept ImportError:\n    models = None",
        "def late():\n    from ...far import away",
    ],
)
def test_an_import_beyond_the_top_is_no_part_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"top_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(head + CLASS.format("return 1"))
    assert not is_bound_to_thread(importlib.import_module(name).Made)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("__package__", None), ("__package__", 3), ("__spec__", None), ("__file__", None),
        ("__name__", 3), ("__loader__", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("head", ["import math", GUARDED])
def test_a_module_that_has_changed_what_is_known_of_it_stops_nothing(
    package: Path, attribute: str, value: object, head: str
) -> None:
    made = made_by(package, f"{head}\n{attribute} = {value!r}")
    assert is_bound_to_thread(made) in (True, False)


class Raising(type):
    """A type whose attributes answer with an error that is no `AttributeError`."""

    def __getattr__(cls, name: str) -> Any:
        raise RuntimeError(name)


class Broken(metaclass=Raising):
    """Has none that its type does not raise for."""


def test_names_that_answer_with_an_error_stop_nothing(package: Path) -> None:
    made: Any = made_by(package, "import math")
    made.__module__ = 3
    assert is_bound_to_thread(made)
    assert class_made_by(lambda: Broken.made()) is None


# What several processes change, read in a project's code and told at the launch


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
        ("class E:\n    n = 0\n    def f(self):\n        type(self).n += 1", "type(self).n"),
        ("X = Players()\ndef f():\n    X.names.append(1)", "X.names"),
        ("X = Players()\ndef f():\n    X.turn = 1", "X.turn"),
        ("X = sqlite3.connect(':memory:')\ndef f():\n    X.execute('')", "X"),
        ("X = itertools.count()\ndef f():\n    return next(X)", "X"),
        ("X = random.Random(3)\ndef f():\n    return X.random()", "X"),
        ("X = numpy.random.default_rng(3)\ndef f():\n    return X.integers(3)", "X"),
    ],
)
def test_a_function_that_changes_its_modules_or_classes_state_is_found(
    source: str, name: str
) -> None:
    [sentence] = told(source)
    assert f" changes {name}, which only sessions of the same process share" in sentence


@pytest.mark.parametrize(
    "source",
    [
        "X = []\nX.append(1)",  # at the import
        "X = []\ndef f():\n    return X[0]",
        "X = sqlite3.connect('file.db')\ndef f():\n    X.execute('')",
        "X = []\ndef f():\n    X = []\n    X.append(1)",
        "X = []\ndef f(X):\n    X.append(1)",
        "_CACHE = {}\ndef f():\n    _CACHE['a'] = 1",
        "class E:\n    n = []\n    def f(self):\n        self.n = []\n        self.n.append(1)",
        "class E:\n    n = 0\n    def f(self):\n        self.n += 1",
        "class O:\n    n = 0\nclass E:\n    def f(self):\n        self.n = 0",
        "def f():\n    random.seed(1)\n    os.getpid()",
        "X = random.Random(3)\nY = [X.random()]\ndef f():\n    return Y[0]",
        "class O:\n    n: list = Field([])\n    def f(self):\n        self.n.append(1)",
        "X = threading.local()\ndef f():\n    X.turn = 1",
        "class E:\n    def f(self):\n        self.x = Random(3)\n        self.x.random()",
    ],
)
def test_what_each_session_has_for_itself_is_not_taken_for_shared(source: str) -> None:
    assert told(source) == []


def test_seeds_and_pids_of_the_import_are_found() -> None:
    assert "seeds random" in told("import numpy\nnumpy.random.seed(1)")[0]
    assert "reads the pid" in told("import os\nPID = os.getpid()")[0]


@pytest.mark.parametrize("how", [{"shards": 1}, {"shards": 2}, {"isolate": True}])
def test_a_launch_says_it_where_several_processes_serve(
    start: StartHost, tmp_path: Path, how: dict[str, object]
) -> None:
    (tmp_path / "shared_game.py").write_text(ENVIRONMENT)
    ready = start("shared_game:Sample", **how).ready()
    [sentence] = ready["differences"]
    assert sentence.startswith("shared_game.py:11 changes SCORES, ")
    assert ready.get("notes", []) == ([] if how == {"shards": 1} else [sentence])
