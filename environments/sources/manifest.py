# SPDX-License-Identifier: Apache-2.0
"""Reads and checks `openenv.yaml`, and reports every mistake with its line and field.

The module reads the keys that decide how an environment is launched. All others belong to the
project, are kept as they are, and go to `/metadata`.

    name                    the environment's name, mostly also the package's; default: the folder's
    app                     `module:attribute` of an upstream project's app, or the module's path
    class                   `module:Class`, which is served without upstream's package
    reset_first             `false`: steps need no reset before them; the env host reads it
    validation.resources    {episode_timeout_s, gpus}

Upstream's server never reads the file, so projects are published with any text in it. A mistake is
an error only if the file names a `class`, which no other server serves. In other projects it is a
warning, and the field counts as absent; a file that is not YAML counts as absent as a whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...schema.errors import ManifestError
from ...system.text.units import MB

if TYPE_CHECKING:
    import yaml

MANIFEST_NAME = "openenv.yaml"
MAX_BYTES = MB // 8
MAX_VALUES = 100_000
MOST = 10**9  # the limit on any resource, in its unit
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of an `openenv.yaml`."""

    path: Path
    name: str
    app: str | None = None  # `module:attribute`
    app_place: str = ""  # the file, and the line that names the app
    env_class: str | None = None
    gpus: int | None = None
    episode_timeout_seconds: float | None = None
    max_surge: str | None = None  # of replacements of replicas
    max_unavailable: str | None = None
    data: dict[str, Any] = field(default_factory=dict)  # the whole content
    warnings: tuple[str, ...] = ()  # its mistakes, with line and field
    fault: ManifestError | None = None  # why no part of it can be used


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder, which is empty if the file cannot be used.

    Raises `ManifestError` if it names a class, and a field is wrong.
    """
    path = folder / MANIFEST_NAME
    try:
        return parse_manifest(path, _read(path))
    except OSError as exc:
        fault = ManifestError(path, f"cannot be read ({exc.strerror})")
    except UnicodeDecodeError:
        fault = ManifestError(path, "is not UTF-8 text")
    except ManifestError as exc:
        if exc.field is not None:
            raise
        fault = exc
    warning = f"{fault.message}; going on as if there were none"
    return Manifest(path, folder.name, warnings=(warning,), fault=fault)


def _read(path: Path) -> str:
    size = path.stat().st_size
    if not path.is_file():
        raise ManifestError(path, "is not a file")
    if size > MAX_BYTES:
        raise ManifestError(path, f"has {size} bytes; a manifest has at most {MAX_BYTES}")
    return path.read_text(encoding="utf-8")


def parse_manifest(path: Path, text: str) -> Manifest:
    """Return the manifest in a text; `path` is for messages.

    Raises `ManifestError` if the text is not YAML, or names a class and has a wrong field.
    """
    data, lines = _load(path, text)
    fields = _Fields(path, data, lines)
    fields.read("reset_first", _flag)
    return Manifest(
        path=path,
        name=fields.read("name", _name) or path.parent.name,
        app=fields.read("app", _app),
        app_place=f"{path}, line {lines['app']}" if "app" in lines else "",
        env_class=fields.read("class", _reference),
        gpus=fields.read("validation.resources.gpus", lambda value: int(_number(value))),
        episode_timeout_seconds=fields.read("validation.resources.episode_timeout_s", _number),
        max_surge=fields.read("update.max_surge", _number_or_percentage),
        max_unavailable=fields.read("update.max_unavailable", _number_or_percentage),
        data=data,
        warnings=tuple(dict.fromkeys(fields.warnings)),
    )


class _Fields:
    """Looks fields up by their dotted names, and records mistakes with their lines."""

    def __init__(self, path: Path, data: Mapping[str, Any], lines: Mapping[str, int]) -> None:
        self._path = path
        self._data = data
        self._lines = lines
        self.warnings: list[str] = []

    def read(self, name: str, parse: Callable[[Any], T]) -> T | None:
        """Return a field's parsed value; None: it is absent, or `parse` has raised `ValueError`.

        Raises `ManifestError` if the field is wrong, and the manifest names a class.
        """
        value: Any = self._data
        at = ""
        try:
            for key in name.split("."):
                if not isinstance(value, Mapping):
                    raise ValueError(f"must have fields, not be {value!r}")
                at = f"{at}.{key}".lstrip(".")
                value = value.get(key)
                if value is None:
                    return None
            return parse(value)
        except ValueError as exc:
            fault = ManifestError(self._path, str(exc), line=self._lines.get(at), field=at)
        if is_reference(str(self._data.get("class"))):
            raise fault
        self.warnings.append(fault.message)
        return None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be text, not {value!r}")
    if not value.isprintable():
        raise ValueError(f"must be one line of printable text, not {value!r}")
    return value.strip()


def _name(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return _text(str(value) if is_number else value)  # `2048`


def _reference(value: Any) -> str:
    if not is_reference(text := _text(value)):
        raise ValueError(f"must be written module:attribute, not {text!r}")
    return text


def _app(value: Any) -> str:
    """Return `module:attribute`, even if it is written as a path, or within a mapping."""
    if not isinstance(value, Mapping):
        return app_reference(_text(value)) or _reference(value)
    words = (word for each in value.values() for word in str(each).split())
    if (found := next(filter(None, map(app_reference, words)), None)) is None:
        raise ValueError("names no app: write it module:attribute")
    return found


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, not {value!r}")
    if not 0 <= value <= MOST:  # which excludes nan
        raise ValueError(f"must be a number from 0 to {MOST:,}")
    return float(value)


def _number_or_percentage(value: Any) -> str:
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,4}%?", text):
        raise ValueError(f"must be a number or a percentage, not {value!r}")
    return text


def is_reference(text: str) -> bool:
    """Return whether a text has the form `package.module:attribute`."""
    module, colon, attribute = text.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    return bool(colon) and all(part.isidentifier() for part in parts)


def app_reference(text: str) -> str | None:
    """Return the `module:attribute` that a text names, perhaps by a path; None: it names none.

    `server/app.py`, `server/app.py:app` and `server.app` are `server.app:app`.
    """
    place, colon, attribute = text.partition(":")
    is_path = place.endswith(".py")
    if not (is_path or "." in place or colon):
        return None
    module = place.removesuffix(".py").removeprefix("./").removeprefix("/").replace("/", ".")
    called = attribute.removesuffix("()")
    reference = f"{module}:{called if colon else 'app'}"
    return reference + attribute[len(called) :] if is_reference(reference) else None


def _load(path: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping, and the line (from 1) of every field by its dotted name."""
    import yaml  # here: the daemon's API does not need it

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _count(node, {}) > MAX_VALUES:
            raise ManifestError(path, "has too many *aliases of &anchors")
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = None if mark is None else mark.line + 1
        raise ManifestError(path, exc.problem or "is not YAML", line=line) from exc
    except RecursionError as exc:
        raise ManifestError(path, "is nested too deeply") from exc
    except (yaml.YAMLError, ValueError) as exc:
        raise ManifestError(path, f"is not YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(data, dict) or not isinstance(node, yaml.MappingNode):
        raise ManifestError(path, "must be a mapping of fields, such as `name: my_env`", line=1)
    return data, _lines_of(node)


def _count(node: yaml.Node, counted: dict[int, float]) -> float:
    """Count the values in a node, with those for which aliases and merges (`<<`) stand.

    A few lines can stand for a terabyte, and an alias within its own anchor has no end.
    """
    if id(node) not in counted:
        counted[id(node)] = math.inf  # while it is counted: an alias of it is within it
        parts = node.value if isinstance(node.value, list) else ()
        pairs = (part if isinstance(part, tuple) else (part,) for part in parts)
        counted[id(node)] = 1 + sum(_count(child, counted) for pair in pairs for child in pair)
    return counted[id(node)]


def _lines_of(node: yaml.MappingNode, prefix: str = "") -> dict[str, int]:
    lines: dict[str, int] = {}
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        lines[name] = key.start_mark.line + 1
        if value.id == "mapping":
            lines |= _lines_of(value, f"{name}.")
    return lines
