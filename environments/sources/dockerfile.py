# SPDX-License-Identifier: Apache-2.0
"""Reads the author's own set-up from the project's Dockerfile, and never runs it.

    `Dockerfile` ▶ RUN ──────────────▶ commands ─▶ arguments of pip and uv, in order
               ├▶ ENTRYPOINT and CMD ▶ commands ─▶ `started`: the app, or the module that starts it
               └▶ ENV ────────────────────────────▶ `variables_here`: those of the server

A command is a list of words. A command that runs a shell, or a script of the project, is replaced
by the commands in it. A variable has the value that ENV, ARG or an earlier command gave it. ENV is
read from the last stage and those that it is built from, other instructions from all stages.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
# Variables of an image that are its own matter: its programs, its build, and where it listens.
_IMAGES_OWN = re.compile(
    r"PATH|HOME|USER|HOST|PORT|PYTHON(PATH|HOME|UNBUFFERED|DONTWRITEBYTECODE)|VIRTUAL_ENV"
    r"|DEBIAN_FRONTEND|OPENENV_HOME|(LD|UV|PIP|POETRY|OPENENVD)_.*"
)
_UNKNOWN = re.compile(r"\$[\w{]")  # a variable that was not substituted
_OF_AN_ADDRESS = re.compile(r".*(URL|ROUTE|PREFIX|ENDPOINT|(BASE|ROOT)_PATH).*")
# An absolute path in a variable, perhaps in a list or an address such as `sqlite:////app/x.db`.
_PATH = re.compile(r"(?:(?<![^:,;=\s])|(?<=sqlite:///)|(?<=file://))/(?!/)[^:,;\s]*")
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


@dataclass(slots=True)
class Dockerfile:
    """The instructions of a project's Dockerfile; without one, they are empty."""

    name: str  # its path in the project's folder
    folder: Path  # the project's
    env: dict[str, str] = field(default_factory=dict)  # what ENV gives to the last stage
    variables: dict[str, str] = field(default_factory=dict)  # the same, and those of ARG
    # The Python packages that RUN installs: files of requirements, as commands name them; single
    # requirements; and options of uv that request extras and groups of the project itself
    files: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)  # the last ENTRYPOINT, and the last CMD
    workdir: str = ""  # as the last WORKDIR names it
    # Paths in the image, and the files and folders of the project that are copied there
    copies: list[tuple[PurePosixPath, Path]] = field(default_factory=list)


def read_dockerfile(folder: Path) -> Dockerfile:
    """Return the instructions of a project's Dockerfile."""
    name = next((name for name in NAMES if (folder / name).is_file()), "")
    return parse_dockerfile(read_text(folder / name) if name else "", folder, name)


def read_text(path: Path) -> str:
    """Return a file's text; empty: it cannot be read, or is too large."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def started(dockerfile: Dockerfile, scripts: Mapping[str, str]) -> list[Started]:
    """Return the apps and modules that a Dockerfile starts, the likeliest first.

    Shell scripts are searched in the project's folder. `scripts` are the commands that the project
    itself declares: `module:function` by name.
    """
    folder, variables = dockerfile.folder, dict(dockerfile.variables)
    named = [dockerfile.commands.get(name, "") for name in ("ENTRYPOINT", "CMD")]
    in_exec_form = [word for rest in named for word in _exec_form(rest)]
    workdir = PurePosixPath("/", _expanded(dockerfile.workdir, variables))
    files = {str(place): path for place, path in dockerfile.copies if path.is_file()}
    files |= {PurePosixPath(place).name: path for place, path in files.items()}

    def find(word: str) -> Path | None:
        return files.get(str(workdir / word)) or files.get(word) or find_file(word, folder)

    all_found: list[tuple[bool, Started]] = []
    for words in [in_exec_form, *(_words_of(rest) for rest in named if not _exec_form(rest))]:
        directory, depth = dockerfile.workdir, 0
        for command in _commands(words, find):
            each = [_expanded(word, variables) for word in command]
            variables |= {m[1]: m[2] for word in each if (m := _ASSIGNMENT.fullmatch(word))}
            depth += (each[0] in ("if", "case")) - (each[0] in ("fi", "esac"))
            if each[0] == "cd" and len(each) > 1:
                directory = each[1]
            elif (found := _started_by(each, scripts)) is not None:
                copied = (path for place, path in dockerfile.copies if place == workdir / directory)
                paths = variables.get("PYTHONPATH", "").split(":")
                paths += [str(path.relative_to(folder)) for path in copied]
                further = tuple(filter(None, paths))
                found = replace(found, folder=found.folder or directory, further=further)
                all_found.append((depth > 0, found))
    return [each for _, each in sorted(all_found, key=lambda each: each[0])]


def variables_here(dockerfile: Dockerfile) -> dict[str, str | None]:
    """Return the variables by which a Dockerfile configures its server, as they are here.

    A path of the image at which the project lies there becomes the project's. None stands for a
    path that neither the project nor this machine has, and for a value that is not known.
    """
    copies = sorted(dockerfile.copies, key=lambda each: len(each[0].parts), reverse=True)
    here: dict[str, str | None] = {}
    for name, value in dockerfile.env.items():
        if _IMAGES_OWN.fullmatch(name):
            continue
        paths = {each: _path_here(each, copies) for each in _PATH.findall(value)}
        is_address = value.startswith("/") and _OF_AN_ADDRESS.fullmatch(name)
        is_known = not _UNKNOWN.search(value) and (is_address or None not in paths.values())
        own = _PATH.sub(lambda found: paths[found[0]] or found[0], value)  # noqa: B023
        here[name] = own if is_known else None
    return here


def _path_here(text: str, copies: list[tuple[PurePosixPath, Path]]) -> str | None:
    """Return the path here for one in the image; None: there is none."""
    path = PurePosixPath(text)
    for place, own in copies:
        if path.is_relative_to(place):
            mine = own / path.relative_to(place)
            if len(place.parts) > 1 or _exists(mine):  # what is copied to `/` has not all of it
                return f"{mine}/" if text.endswith("/") else str(mine)
    return text if path.is_relative_to("/tmp") or _exists(text) else None  # noqa: S108


def _exists(path: Path | str) -> bool:
    """Return whether a path exists; False also for one that is too long or may not be looked at."""
    return os.path.exists(path)  # noqa: PTH110  `Path.exists` raises


def parse_dockerfile(text: str, folder: Path, name: str = "") -> Dockerfile:
    """Return the instructions in a text, for the project in a folder."""
    found, arguments = Dockerfile(name, folder), dict[str, str]()
    stages: dict[str, dict[str, str]] = {}
    directory = PurePosixPath("/")
    for instruction, rest in _instructions(text):
        known = {**arguments, **found.env}
        match instruction:
            case "FROM":
                base, *more = rest.lower().split()
                found.env = dict(stages.get(base, {}))
                stages |= dict.fromkeys(more[1:], found.env)
            case "ENV" | "ARG":
                (found.env if instruction == "ENV" else arguments).update(_assigned(rest, known))
            case "RUN":
                for words in _commands(_words_of(rest), None):
                    _take_installed(words, found)
            case "ENTRYPOINT" | "CMD":
                found.commands[instruction] = rest
            case "WORKDIR":
                found.workdir = rest
                directory /= _expanded(rest, known)
            case "COPY" | "ADD" if "--from=" not in rest:
                words = [_expanded(word, known) for word in _exec_form(rest) or rest.split()]
                found.copies += _copied(words, directory, folder)
    found.variables = {**arguments, **found.env}
    return found


def _assigned(text: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ENV or ARG sets, in the form `A=x B=y` or `A x`."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    if "=" not in words[0]:
        words = ["=".join((words[0], " ".join(words[1:])))] if words[1:] else []
    found = (m for each in words if (m := _ASSIGNMENT.fullmatch(each)))
    return {each[1]: _expanded(each[2], known) for each in found}


def _copied(
    words: list[str], directory: PurePosixPath, folder: Path
) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield each path in the image to which a file or folder of the project is copied, and it."""
    *sources, target = words
    is_folder = target.endswith(("/", ".")) or len(sources) > 1
    for path in (Path(os.path.normpath(folder / each.lstrip("/"))) for each in sources):
        if path.is_relative_to(folder) and _exists(path):
            inside = path.name if is_folder and path.is_file() else ""
            yield directory / target / inside, path


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda m: variables.get(m[1] or m[2]) or m[3] or m[0], word)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction's name and the rest of it, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in _CONTINUED.sub(" ", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        if rest:
            yield name.upper(), re.sub(r"^(--(?!from=)[\w-]+=\S+\s+)+", "", rest.strip())


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


Find = Callable[[str], Path | None]


def _commands(words: list[str], find: Find | None, depth: int = 0) -> Iterator[list[str]]:
    """Yield the commands in a shell's argument or in a script, or else the command itself."""
    if not words:
        return
    text = None
    if PurePosixPath(words[0]).name in _SHELLS:
        pairs = itertools.pairwise(words)
        text = next((after for word, after in pairs if re.fullmatch(r"-\w*c", word)), None)
    if text is None and find is not None:
        text = next(_scripts(words, find), None)
    if text is None or depth > 2:
        yield words
        return
    for each in _split(text):
        yield from _commands(each, find, depth + 1)


def _scripts(words: list[str], find: Find) -> Iterator[str]:
    """Yield the text of each of the first words that is a shell script, with its arguments."""
    for number, word in enumerate(words[:2], 1):
        path = find(word) if len(word) <= _MAX_PATH_CHARACTERS else None
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


def _take_installed(words: list[str], found: Dockerfile) -> None:
    programs = [PurePosixPath(word).name for word in words]
    is_sync = "sync" in words and "uv" in programs
    is_pip = "install" in words and any(re.fullmatch(r"pip[\d.]*", each) for each in programs)
    if not (is_sync or is_pip):
        return
    parts = words[words.index("sync" if is_sync else "install") + 1 :]
    # `--extra=x` becomes `--extra x`.
    pairs = (word.split("=", 1) if word.startswith(_ASSIGNED_OPTIONS) else [word] for word in parts)
    rest = itertools.chain.from_iterable(pairs)
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
