# SPDX-License-Identifier: Apache-2.0
"""Names of modules, packages, hooks of the import, and files beside the code."""

import importlib
import pickle
from typing import Any

from .habit import Bare, Habit, habit

# Files with the name of a standard-library module, or of a module that a host may import.
NAMES = (
    *("queue.py", "random.py", "signal.py", "tempfile.py", "types.py"),
    *("calendar/__init__.py", "email/__init__.py", "http/__init__.py", "uvicorn/__init__.py"),
)


def named(path: str) -> Habit:
    """Make the habit of a file with this path, whose module a step imports."""
    name = path.removesuffix("/__init__.py").removesuffix(".py").rpartition("/")[2]

    def call(self: Any, how: str) -> Any:
        return importlib.import_module(name).OWN

    call.__name__ = f"names_{name}"
    call.__doc__ = f"A module `{path}`."
    return Habit(call, files={path: "OWN = 'mine'"})


def packaged(name: str, text: str) -> Habit:
    """Make the habit of a package that is not for servers: its `__init__.py` is `text`."""

    def call(self: Any, how: str) -> Any:
        return how

    call.__name__ = f"package_that_{name}"
    call.__doc__ = f"A package whose `__init__.py` is `{text}`."
    return Habit(call, alone=True, files={"__init__.py": text})


class Habits:
    for path in NAMES:
        locals()[path] = named(path)

    fails = packaged("fails", "import torch_of_the_trainer")
    exits = packaged("exits", "__import__('os')._exit(3)")
    hangs = packaged("hangs", "__import__('time').sleep(9999)")

    @habit(files={"game/rules/moves.py": "MOVES = ['left']"})
    def namespace_package(self, how):
        """A package without an `__init__.py`."""
        return importlib.import_module("game.rules.moves").MOVES

    @habit(
        at_import="""
        import importlib.abc, importlib.util, sys
        class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            def find_spec(self, name, path, target=None):
                if name.startswith("made_"):
                    return importlib.util.spec_from_loader(name, self)
            def exec_module(self, module):
                module.ANSWER = 42
        sys.meta_path.insert(0, Finder())
        """,
    )
    def import_hook(self, how):
        """A finder on `sys.meta_path`, installed at import, that makes modules of its own."""
        return importlib.import_module("made_up").ANSWER

    @habit(
        at_import="import importlib, habits.imports; habits.imports.PACKAGE = __package__",
        files={"server/late.py": "from . import later", "server/later.py": "VALUE = 1"},
    )
    def late_imports(self, how):
        """Modules of the project that the first step imports."""
        return importlib.import_module(globals()["PACKAGE"] + ".late").later.VALUE

    def pickles_own_classes(self, how):
        """Objects of the project's classes that are pickled and loaded again."""
        return pickle.loads(pickle.dumps(Bare(3))).value

    def makes_code(self, how):
        """Code that a step compiles and runs."""
        scope: dict[str, Any] = {}
        exec("def double(number):\n    return 2 * number\nanswer = double(21)", scope)
        return scope["answer"]
