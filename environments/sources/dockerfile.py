# SPDX-License-Identifier: Apache-2.0
"""Reads the author's own set-up from the project's Dockerfile, and never runs it.

    Dockerfile ─▶ RUN ───────────────▶ commands ─▶ `installed`: arguments of pip and uv, in order
               └▶ ENTRYPOINT and CMD ▶ commands ─▶ `started`: the app, or the module that starts it

A command is a list of words. A command that runs a shell, or a script of the project, is replaced
by the commands in it. A variable has the value that ENV, ARG or an earlier command gave it. The
instructions of all stages are read, not only those of the last one.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path, PurePosixPath

from ...system.text.units import MB

NAMES = tuple(
    f"{folder}{name}"
    for folder in ("", "server/", "docker/")
    for name in ("Dockerfile", "dockerfile", "Containerfile")
)
MAX_BYTES = 16 * MB
_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_SERVERS = ("uvicorn", "gunicorn", "hypercorn", "granian", "daphne")
_REFERENCE = re.compile(r"([A-Za-z_][\w./]*?)(?:\.py)?:([A-Za-z_][\w.]*)(\(\))?")
_REQUIREMENT = re.compile(r"(git\+\S+|[A-Za-z0-9][\w.-]*(\[[\w.,\s-]*\])?\s*($|[@=<>!~;,(].*))")
_INSTALLERS = ("pip", "setuptools", "uv", "wheel")  # the image needs them, and no project does
_PROJECT_WITH_EXTRAS = re.compile(r"[./][^\[\s]*\[([\w.,\s-]+)\]")
_EXTRA_OPTIONS = ("--extra", "--group", "--all-extras", "--all-groups")
_ASSIGNED_OPTIONS = tuple(f"{option}=" for option in _EXTRA_OPTIONS)
_ALL_ARGUMENTS = re.compile(r"""["']?\$[@*]["']?""")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_ASSIGNMENT = re.compile(r"(\w+)=(.*)")
_SHELL_SCRIPT = re.compile(r"#!.*\b(ba|da|a|z)?sh\b")
_MAX_PATH_CHARACTERS = 255
_CONTINUED = re.compile(r"\\[ \t]*\n")
# Options of pip and uv that are followed by a value, which is not a package.
_WITH_VALUE = frozenset(
    {"-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--trusted-host", "--index"}
    | {"-t", "--target", "--prefix", "-p", "--python", "-c", "--constraint", "--timeout"}
    | {"--retries", "--default-index", "--cache-dir", "--index-strategy", "--platform"}
)


@dataclass(frozen=True, slots=True)
class Started:
    """The app or module that a command starts."""

    module: str  # its dotted name
    attribute: str = ""  # the app in it; empty: the module is run as a program
    is_factory: bool = False  # whether the attribute is called to make the app
    folder: str = ""  # the folder of the module, as the command or WORKDIR names it
    # Further folders that modules are imported from: those of PYTHONPATH, and those whose files are
    # copied to the folder in which the command runs
    further: tuple[str, ...] = ()
    is_app_dir: bool = False  # whether the command runs in another folder


def read_dockerfile(folder: Path) -> tuple[str, str]:
    """Return a project's Dockerfile: its path in the folder, and its text; both may be empty."""
    name = next((name for name in NAMES if (folder / name).is_file()), "")
    return name, read_text(folder / name) if name else ""


def read_text(path: Path) -> str:
    """Return a file's text; empty: it cannot be read, or is too large."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(slots=True)
class Installed:
    """The Python packages that the RUN instructions of a Dockerfile install."""

    # Files of requirements, as the commands name them
    files: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)  # as requirements
    # Options of uv that request extras and groups of the project itself
    options: list[str] = field(default_factory=list)


def installed(text: str) -> Installed:
    """Return the Python packages that the RUN instructions of a Dockerfile install."""
    found = Installed()
    for name, rest in _instructions(text):
        for words in _commands(_words_of(rest), None) if name == "RUN" else ():
            _take_installed(words, found)
    return Installed(*(list(dict.fromkeys(each)) for each in astuple(found)))


def started(text: str, folder: Path, scripts: Mapping[str, str]) -> Iterator[Started]:
    """Yield the apps and modules that a Dockerfile starts, the likeliest first.

    Shell scripts are searched in the project's folder. `scripts` are the commands that the project
    itself declares: `module:function` by name.
    """
    last = dict(_instructions(text))
    variables = dict(_variables(text))
    named = [last[name] for name in ("ENTRYPOINT", "CMD") if name in last]
    in_exec_form = [word for rest in named for word in _exec_form(rest)]
    for words in [in_exec_form, *(_words_of(rest) for rest in named if not _exec_form(rest))]:
        directory = last.get("WORKDIR", "")
        for command in _commands(words, folder):
            each = [_expanded(word, variables) for word in command]
            variables |= {m[1]: m[2] for word in each if (m := _ASSIGNMENT.fullmatch(word))}
            if each[0] == "cd" and len(each) > 1:
                directory = each[1]
            elif (found := _started_by(each, scripts)) is not None:
                paths = [*variables.get("PYTHONPATH", "").split(":"), *_copied_to(text, directory)]
                further = tuple(filter(None, paths))
                yield replace(found, folder=found.folder or directory, further=further)


def _copied_to(text: str, directory: str) -> Iterator[str]:
    """Yield the project's folders and files that are copied into a directory of the image."""
    for name, rest in _instructions(text):
        words = rest.split() if name in ("COPY", "ADD") and "--from=" not in rest else []
        if words and words[-1].rstrip("/") in (".", directory.rstrip("/")):
            yield from words[:-1]


def _variables(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each variable that an ENV or ARG instruction sets."""
    for name, rest in _instructions(text):
        if name in ("ENV", "ARG"):
            words = next(_split(rest), [])
            if len(words) == 2 and "=" not in words[0]:
                yield words[0], words[1]
            yield from ((m[1], m[2]) for word in words if (m := _ASSIGNMENT.fullmatch(word)))


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda m: variables.get(m[1] or m[2]) or m[3] or m[0], word)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction's name and the rest of it, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in _CONTINUED.sub(" ", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        if rest:
            yield name.upper(), re.sub(r"^(--[\w-]+=\S+\s+)+", "", rest.strip())


def _exec_form(text: str) -> list[str]:
    """Return the words of an instruction in exec form, `["a", "b"]`; empty in another form."""
    with suppress(ValueError):
        words = json.loads(text)
        if isinstance(words, list):
            return [str(word) for word in words]
    return []


def _words_of(text: str) -> list[str]:
    """Return the words of an instruction in either form."""
    return _exec_form(text) or ["sh", "-c", text]


def _commands(words: list[str], folder: Path | None, depth: int = 0) -> Iterator[list[str]]:
    """Yield the commands in a shell's argument or in a script, or else the command itself."""
    if not words:
        return
    text = None
    if PurePosixPath(words[0]).name in _SHELLS:
        pairs = itertools.pairwise(words)
        text = next((after for word, after in pairs if re.fullmatch(r"-\w*c", word)), None)
    if text is None and folder is not None:
        text = next(_scripts(words, folder), None)
    if text is None or depth > 2:
        yield words
        return
    for each in _split(text):
        yield from _commands(each, folder, depth + 1)


def _scripts(words: list[str], folder: Path) -> Iterator[str]:
    """Yield the text of each of the first words that is a shell script, with its arguments."""
    for number, word in enumerate(words[:2], 1):
        path = find_file(word, folder) if len(word) <= _MAX_PATH_CHARACTERS else None
        if path is not None and (path.suffix == ".sh" or _SHELL_SCRIPT.match(read_text(path))):
            arguments = shlex.join(words[number:]).replace("\\", r"\\")
            yield _ALL_ARGUMENTS.sub(arguments, read_text(path))


def find_file(named: str, folder: Path) -> Path | None:
    """Return the project's file for a path in the image."""
    return next((path for path in places(named, folder) if path.is_file()), None)


def places(named: str, folder: Path) -> list[Path]:
    """Return the project's paths that may be a path in the image: for `/app/x`, `app/x` and `x`."""
    parts = [part for part in PurePosixPath(named).parts if part not in ("/", ".", "..")]
    return [folder.joinpath(*parts[start:]) for start in range(len(parts))]


def _split(text: str) -> Iterator[list[str]]:
    """Yield the commands in a shell's text."""
    for line in _CONTINUED.sub(" ", text).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            words = line.split()
        for is_end, command in itertools.groupby(words, lambda word: set(word) <= set("&|;()")):
            if not is_end:
                yield list(command)


def _take_installed(words: list[str], found: Installed) -> None:
    programs = [PurePosixPath(word).name for word in words]
    is_sync = "sync" in words and "uv" in programs
    is_pip = "install" in words and any(re.fullmatch(r"pip[\d.]*", each) for each in programs)
    if not (is_sync or is_pip):
        return
    parts = words[words.index("sync" if is_sync else "install") + 1 :]
    # `--extra=x` becomes `--extra x`.
    rest = iter(
        [
            part
            for word in parts
            for part in (word.split("=", 1) if word.startswith(_ASSIGNED_OPTIONS) else [word])
        ]
    )
    for word in rest:
        if word in _EXTRA_OPTIONS:
            value = [] if word.startswith("--all") else [next(rest, "")]
            found.options.append(" ".join([word, *value]))
        elif word in ("-r", "--requirement", "--requirements"):
            found.files.append(next(rest, ""))
        elif word.startswith(("--requirement=", "-r")):
            found.files.append(word.removeprefix("--requirement=").removeprefix("-r"))
        elif word in _WITH_VALUE or set(word) <= set("<>"):
            next(rest, None)
        elif extras := _PROJECT_WITH_EXTRAS.fullmatch(word):
            found.options += [f"--extra {each.strip()}" for each in extras[1].split(",")]
        elif is_pip and _REQUIREMENT.fullmatch(word) and word not in _INSTALLERS:
            found.packages.append(word)


def _started_by(words: list[str], scripts: Mapping[str, str]) -> Started | None:
    names = [PurePosixPath(word).name for word in words]
    if server := next((n for n, name in enumerate(names, 1) if name in _SERVERS), None):
        return _of_server(words[server:])
    path = next((word for word in words[1:] if word.endswith(".py")), "")
    if "fastapi" in names and {"run", "dev"} & set(words):
        path = path or "main.py"
    elif "-m" in words[:-1]:
        return Started(words[words.index("-m") + 1])
    if path:
        parts = [p for p in PurePosixPath(path.removesuffix(".py")).parts if p not in ("/", ".")]
        return Started(".".join(parts))
    script = next((scripts[name] for name in names if name in scripts), "")
    return Started(script.partition(":")[0]) if script else None


def _of_server(words: list[str]) -> Started | None:
    found = next((match for word in words if (match := _REFERENCE.fullmatch(word))), None)
    if found is None:
        return None
    # `--app-dir x` or `--app-dir=x`; gunicorn's `--chdir`
    pairs = itertools.pairwise(part for word in words for part in word.split("=", 1))
    option, folder = next((each for each in pairs if each[0] in ("--app-dir", "--chdir")), ("", ""))
    module = found[1].replace("/", ".").strip(".")
    is_factory = bool(found[3]) or "--factory" in words
    return Started(module, found[2], is_factory, folder, is_app_dir=option == "--app-dir")
