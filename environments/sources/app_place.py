# SPDX-License-Identifier: Apache-2.0
"""Decides which app of a project is served, by reading its files, without importing any.

    the Dockerfile starts one that exists   ─▶ that: upstream's server never reads `openenv.yaml`
    `openenv.yaml` names one                ─▶ that
    `server/app.py` has one                 ─▶ that, in upstream's place
    another usual file has one              ─▶ that, or the one that the command `server` starts
    only one file has one                   ─▶ that, if the folder has an `openenv.yaml`
    none of these                           ─▶ upstream's place, which is reported to be empty; an
                                               error, if there are apps that cannot be served

If a module is started as a program, or a function is named that starts a server, the app is the one
that the module passes to uvicorn, or else its `app`.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...schema.errors import UnknownSource
from .dockerfile import Started, places, read_dockerfile, read_text, started
from .manifest import MANIFEST_NAME

DEFAULT_APP = "server.app:app"
_USUAL = ("server.app", "app", "main", "app.main", "app.app", "server.main", "server", "src.main")
_ANYWHERE = ("*.py", "*/*.py", "src/*/*.py", "src/*/*/*.py")
_MAX_FILES = 200  # that are read
_NO_PLACES = frozenset({"tests", "test", "examples", "scripts", "venv", "node_modules"})
_FACTORY = re.compile(r"(create|make|build|get)_\w*app")
MAX_SOURCE_CHARACTERS = 256 * 1024  # of a module; parsing takes a hundred times its memory
_MAIN = "__main__"
_MAKERS = re.compile(r"create_\w*app|FastAPI|Starlette")
_IMPORT = re.compile(r"^(?:from +(\.*)([\w.]*) +)?import +\(?([\w., \n]*)", re.MULTILINE)
_APPS = ("app", "api")  # the names that `fastapi run` looks for, too
_SERVERS = ("uvicorn.run", "uvicorn.Config")
_EVERYTHING = "*"  # stands for names of a module that are not known
_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


@dataclass(frozen=True, slots=True)
class App:
    """The app that is served."""

    reference: str = DEFAULT_APP  # `module:attribute`; with `()` behind it the attribute is called
    place: str = ""  # the file, and the line, that names it, for messages
    folders: tuple[Path, ...] = ()  # further folders that modules are imported from
    cwd: Path | None = None  # the folder in which it runs; None: the project's
    # The package for which the project's folder stands, if that is known
    package: str | None = None
    note: str | None = None  # a sentence for the user, if there was a choice
    fallback: str = DEFAULT_APP  # the app that is served if this one is missing


@dataclass(frozen=True, slots=True)
class _Found:
    """An app whose file exists."""

    module: str  # the name by which the project can import it
    asked: str  # the name that was searched
    attribute: str
    path: Path
    folder: Path | None

    @property
    def reference(self) -> str:
        return f"{self.module}:{self.attribute}"


def choose_app(
    folder: Path, named: str | None, place: str, scripts: Mapping[str, str]
) -> App | None:
    """Return the app of the project in a folder; None when no file of it has one.

    `named` is the app in `openenv.yaml`, and `place` its line there, for messages. `scripts` are
    the commands that the project declares: `module:function` by name. Raises `UnknownSource` if it
    has an app that cannot be imported, or several of which none is named.
    """
    dockerfile = read_dockerfile(folder)
    commands = started(dockerfile, scripts)
    own, command = next(((f, c) for c in commands if (f := _find(folder, c))), (None, Started("")))
    asked = _find(folder, _parse(named)) if named else None
    # Those that the project itself can import, by their own names.
    servers = [_parse(target) for command, target in scripts.items() if command == "server"]
    usual = _all_own(folder, [*map(Started, _USUAL), *servers])
    if not usual and (folder / MANIFEST_NAME).is_file():
        elsewhere = _all_own(folder, _modules(folder))
        usual = elsewhere if len(elsewhere) == 1 else []
    if own is not None:
        others = [each for each in [asked, *usual] if each and each.path != own.path]
        note = f"serving {own.reference}, which {dockerfile.name} starts"
        note += f"; {place} names {named}" if asked in others else ""
        needs_note = bool(others) or own.path != folder / "server" / "app.py"
        further = (_find_folder(each, folder) for each in command.further)
        package = own.asked.removesuffix(f".{own.module}")
        return App(
            own.reference,
            str(folder / dockerfile.name),
            tuple(dict.fromkeys(filter(None, [own.folder, *further]))),
            cwd=None if command.is_app_dir else own.folder,
            package=package if package != own.asked else None,
            note=note if needs_note else None,
        )
    if named is not None:
        if asked is None and not usual:
            _explain_module(folder, _parse(named))
        other = usual[0].reference if usual else DEFAULT_APP
        return App(f"{asked.asked}:{asked.attribute}" if asked else named, place, fallback=other)
    if not usual:
        _explain(folder, [*commands, *map(Started, _USUAL), *servers])
        return None
    first = usual[0]
    note = f"serving {first.reference}, the only app that was found in {folder}"
    if more := ", ".join(each.reference for each in usual if each.path != first.path):
        note = f"serving {first.reference}; to serve {more}, name it as `app` in openenv.yaml"
    return App(first.reference, place, note=None if first.reference == DEFAULT_APP else note)


def _explain(folder: Path, likely: Iterable[Started]) -> None:
    """Raise `UnknownSource` if the project has apps of which none can be served."""
    for each in likely:
        _explain_module(folder, each)
    modules = sorted(_modules(folder), key=lambda each: each.module)
    if apps := [app.reference for app in _all_own(folder, modules)]:
        which = " or ".join(apps)
        message = f"no Dockerfile or {MANIFEST_NAME} names the app of {folder}; it may be {which}"
        hint = f"write it into {folder / MANIFEST_NAME}: `app: {apps[0]}`"
        raise UnknownSource(message, hint)
    for each in modules:
        _explain_module(folder, each)


def _explain_module(folder: Path, asked: Started) -> None:
    """Raise `UnknownSource` if a module that makes an app is no Python, or makes it too late."""
    module, path, _ = _locate(folder, asked) or ("", folder, None)
    text = read_text(path)
    if len(text) > MAX_SOURCE_CHARACTERS or not _MAKERS.search(text):
        return
    try:
        tree = ast.parse(text)
    except SyntaxError as exc:
        message = f"{path}, line {exc.lineno}: {exc.msg}; so no app was found in it"
        raise UnknownSource(message, "correct it and launch again") from None
    except (ValueError, RecursionError, MemoryError):
        return
    functions = (e for e in ast.walk(tree) if isinstance(e, ast.FunctionDef | ast.AsyncFunctionDef))
    makers: dict[ast.AST, str] = {each: f"{each.name}()" for each in functions}
    makers |= {each: "the block of `__main__`" for each in tree.body if _is_main_block(each)}
    for node, maker in makers.items():
        inside = [*ast.walk(node)]
        calls = [each for each in inside if isinstance(each, ast.Call)]
        lines = [c.lineno for c in calls if _MAKERS.fullmatch(ast.unparse(c.func).split(".")[-1])]
        hint = "assign it at the top of the file: `app = …`"
        if any(isinstance(each, ast.Return) and each.value for each in inside):
            hint += f"; or name the function in {MANIFEST_NAME}: `app: {module}:{maker}`"
        if lines and _EVERYTHING not in _contents(text, module)[0]:
            what = f"{path}, line {lines[0]}: {maker} makes the app"
            raise UnknownSource(f"{what}, so no server can import it", hint)


def _is_main_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == f"__name__ == {_MAIN!r}"


def _parse(reference: str) -> Started:
    module, _, attribute = reference.partition(":")
    return Started(module, attribute.removesuffix("()"), attribute.endswith("()"))


def _all_own(folder: Path, asked: Iterable[Started]) -> list[_Found]:
    """Return the apps of those modules that the project can import by their own names."""
    found = (each for each in (_find(folder, one) for one in asked) if each and not each.folder)
    return [each for each in found if each.module in (each.asked, f"{each.asked}.{_MAIN}")]


def _modules(folder: Path) -> list[Started]:
    """Return the modules near the top of a project."""
    paths = itertools.chain.from_iterable(map(folder.glob, _ANYWHERE))
    found = itertools.islice(paths, _MAX_FILES)
    parts = [path.relative_to(folder).with_suffix("").parts for path in found]
    inside = [each[1:] if each[0] == "src" else each for each in parts]
    return [
        Started(".".join(each).removesuffix(".__init__"))
        for each in inside
        if not _NO_PLACES & set(each) and all(part.isidentifier() for part in each)
    ]


def _find(folder: Path, asked: Started, depth: int = 0) -> _Found | None:
    """Return the app of a module: the named one, the one passed to a server, or its `app`."""
    located = _locate(folder, asked)
    if located is None or depth > 2:
        return None
    module, path, base = located
    names, functions, served = _contents(read_text(path), module)
    attribute = asked.attribute
    if asked.is_factory:
        attribute += "()"
    elif attribute.partition(".")[0] not in names:
        called = served.removesuffix("()")
        if module.endswith(f".{_MAIN}") and (other := _find_imported(folder, module, path, called)):
            return other
        if called.partition(".")[0] in names or (called != served and called in functions):
            attribute = served
        elif own := next((name for name in _APPS if name in names), None):
            attribute = own
        elif ":" in served:
            return _find(folder, _parse(served), depth + 1)
        elif attribute in functions and _FACTORY.fullmatch(attribute):
            attribute += "()"
        elif attribute not in functions and not (attribute and _EVERYTHING in names):
            return None
    return _Found(module, asked.module, attribute or "app", path, base)


def _find_imported(folder: Path, module: str, path: Path, name: str) -> _Found | None:
    """Return the app that a module imports from another one."""
    package = module.rpartition(".")[0]
    for line in re.finditer(
        rf"^from +(\.?)([\w.]+) +import .*\b{name}\b", read_text(path), re.MULTILINE
    ):
        other = f"{package}.{line[2]}" if line[1] else line[2]
        if name and (found := _find(folder, Started(other, name), 1)):
            return found
    return None


def _locate(folder: Path, asked: Started) -> tuple[str, Path, Path | None] | None:
    """Return a module's name in the project, its file, and the further folder to import it from.

    In the image, the project's folder may have another name (`envs.my_env.server.app`), and the
    author's command may run in one of the project's folders.
    """
    parts = asked.module.split(".")
    named = places(asked.folder, folder)
    usual = [folder, folder / "src"]
    # An absolute path in the image may be the whole project's, rather than one of its folders'.
    bases = [*usual, *named] if asked.folder.startswith("/") else [*named, *usual]
    further = [path for each in asked.further if (path := _find_folder(each, folder)) is not None]
    for base in [*bases, *further, folder / "server", folder / "app"]:
        module = base.joinpath(*parts)
        inside = None if base in usual else base
        main = module / f"{_MAIN}.py"
        if not asked.attribute and main.is_file():
            return f"{asked.module}.{_MAIN}", main, inside
        if path := _file_of(module):
            return asked.module, path, inside
    for start in range(1, len(parts)):
        path = folder.joinpath(*parts[start:]).with_suffix(".py")
        if path.is_file():
            return ".".join(parts[start:]), path, None
    return None


def _file_of(module: Path) -> Path | None:
    files = (module / "__init__.py", module.with_suffix(".py"))
    return next((each for each in files if each.is_file()), None)


def _find_folder(named: str, folder: Path) -> Path | None:
    return next((path for path in places(named, folder) if path.is_dir()), None)


def _contents(source: str, module: str) -> tuple[set[str], set[str], str]:
    """Return a module's names of values and of functions, and the app that it gives to uvicorn."""
    try:
        tree = ast.parse(source if len(source) <= MAX_SOURCE_CHARACTERS else "from app import *")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {_EVERYTHING}, set(), ""
    names: set[str] = set()
    functions: set[str] = set()
    for node in _top_level(tree):
        if isinstance(node, ast.FunctionDef):
            is_wsgi = [each.arg for each in node.args.args][1:] == ["start_response"]
            (names if is_wsgi else functions).add(node.name)  # the env host refuses WSGI apps
        elif isinstance(node, ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    served = next(_served(tree), "")
    if f".{module}".endswith(f".{served.partition(':')[0]}"):  # the module names itself
        served = served.rpartition(":")[2]
    return names, functions - names, served


def stands_alone(folders: Sequence[Path], module: str) -> bool:
    """Return whether a module is in one of the folders, and can be imported by its own name.

    If it, or a module there that it imports, has a relative import that leads out of the folders,
    it can only be imported as part of a package. Imports in a block may be guarded or late.
    """
    pending, seen = [module], set[str]()
    while pending and len(seen) < _MAX_FILES:
        parts = (name := pending.pop()).split(".")
        path = next(filter(None, (_file_of(base.joinpath(*parts)) for base in folders)), None)
        if name in seen or path is None:
            continue
        seen.add(name)
        package = parts if path.stem == "__init__" else parts[:-1]
        pending.append(".".join(parts[:-1]) or name)
        for dots, base, names in _IMPORT.findall(read_text(path)):
            if len(dots) > len(package):
                return False
            above = package[: len(package) - len(dots) + 1] if dots else []
            start = ".".join(filter(None, [*above, base]))
            each = [one.split()[0] for one in names.split(",") if one.strip()]
            pending += [start, *(f"{start}.{one}".lstrip(".") for one in each)]
    return module in seen


def _top_level(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that Python executes when it imports the module."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _SCOPES) and not _is_main_block(node):
            yield from _top_level(node)


def _served(tree: ast.AST) -> Iterator[str]:
    """Yield the app of each call of uvicorn: `module:name`, a name, or `name()` for a factory."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(_SERVERS):
            continue
        options = {each.arg: each.value for each in node.keywords}
        is_factory = isinstance(factory := options.get("factory"), ast.Constant) and factory.value
        call = "()" if is_factory else ""
        match node.args[0] if node.args else options.get("app"):
            case ast.Constant(value=str(reference)) if ":" in reference:
                yield reference + call
            case ast.Name() | ast.Attribute() as named:
                yield ast.unparse(named) + call
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]):
                yield f"{name}()"
