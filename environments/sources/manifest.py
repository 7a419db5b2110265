# SPDX-License-Identifier: Apache-2.0
"""`openenv.yaml`: read, checked; every mistake is reported with its line and field.

Covers the keys that decide how an environment is launched; all others are kept as they are (they
are the project's, and go to `/metadata`).

    name                    the environment's and, mostly, the package's name; else the folder's
    app                     `module:attribute` of an upstream project's app, or the module's path
    class                   `module:Class`: served without upstream's package
    reset_first             `false`: steps need no reset before them; the env host reads it
    validation.resources    {cpu, memory_mb, disk_mb, episode_timeout_s, gpus}

Upstream's server never reads the file, so projects are published with any text in it. A mistake is
an error only where the file names a `class`, which we alone serve. In other projects it is a
warning, and the field counts as absent; the whole file does where it is no YAML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...system.units import MB
from ..errors import ManifestError
from ..spec import ResourceRequest

if TYPE_CHECKING:
    import yaml

MANIFEST_NAME = "openenv.yaml"
MAX_BYTES = MB // 8
MAX_VALUES = 100_000
MOST = 10**9  # of any resource, in its unit


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an `openenv.yaml` says."""

    path: Path
    name: str
    app: str | None = None  # `module:attribute`
    app_place: str = ""  # the file, and the line that names the app
    env_class: str | None = None
    resources: ResourceRequest = field(default_factory=ResourceRequest)
    data: dict[str, Any] = field(default_factory=dict)  # all of it, as it is
    warnings: tuple[str, ...] = ()  # its mistakes, each with its place
    fault: ManifestError | None = None  # why nothing of it can be used


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder; one without a word, where it cannot be used.

    Raises:
        ManifestError: it names a class, and a field is wrong.
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
    return Manifest(path, folder.name, app_place=str(path), warnings=(warning,), fault=fault)


def _read(path: Path) -> str:
    size = path.stat().st_size
    if not path.is_file():
        raise ManifestError(path, "is not a file")
    if size > MAX_BYTES:
        raise ManifestError(path, f"has {size} bytes; a manifest has at most {MAX_BYTES}")
    return path.read_text(encoding="utf-8")


def parse_manifest(path: Path, text: str) -> Manifest:
    """The manifest that `text` spells; `path` is for messages.

    Raises:
        ManifestError: it is no YAML; or it names a class, and a field is wrong.
    """
    data, lines = _load(path, text)
    check = _Checker(path, data, lines)
    check.flag("reset_first")
    return Manifest(
        path=path,
        name=check.name() or path.parent.name,
        app=check.app(),
        app_place=f"{path}, line {lines['app']}" if "app" in lines else str(path),
        env_class=check.reference("class"),
        resources=_resources(check),
        data=data,
        warnings=tuple(check.warnings),
    )


def _resources(check: _Checker) -> ResourceRequest:
    prefix = "validation.resources"
    memory_mb = check.number(f"{prefix}.memory_mb")
    disk_mb = check.number(f"{prefix}.disk_mb")
    gpus = check.number(f"{prefix}.gpus")
    return ResourceRequest(
        cpu=check.number(f"{prefix}.cpu"),
        memory_bytes=None if memory_mb is None else int(memory_mb * MB),
        disk_bytes=None if disk_mb is None else int(disk_mb * MB),
        gpus=None if gpus is None else int(gpus),
        episode_timeout_seconds=check.number(f"{prefix}.episode_timeout_s"),
    )


class _Checker:
    """Looks fields up by their dotted names, and reports faults with their lines."""

    def __init__(self, path: Path, data: Mapping[str, Any], lines: Mapping[str, int]) -> None:
        self._path = path
        self._data = data
        self._lines = lines
        self.warnings: list[str] = []

    def name(self) -> str | None:
        value = self._value("name")
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)  # `2048`
        return self._text("name", value)

    def app(self) -> str | None:
        """`module:attribute`, also where it is written as a path, or within a mapping."""
        value = self._value("app")
        if isinstance(value, Mapping):
            words = (word for each in value.values() for word in str(each).split())
            found = next((each for word in words if (each := app_reference(word))), None)
            if found is None:
                self._fault("app", "names no app: write it module:attribute")
            return found
        if (text := self._text("app", value)) is None:
            return None
        if (found := app_reference(text)) is None:
            self._fault("app", f"must be written module:attribute, not {value!r}")
        return found

    def reference(self, name: str) -> str | None:
        """`module:attribute`."""
        value = self._text(name, self._value(name))
        if value is None or is_reference(value):
            return value
        self._fault(name, f"must be written module:attribute, not {value!r}")
        return None

    def _text(self, name: str, value: Any) -> str | None:
        if isinstance(value, str) and value.strip() and value.isprintable():
            return value.strip()
        if isinstance(value, str) and value.strip():
            self._fault(name, f"must be one line of printable text, not {value!r}")
        elif value is not None:
            self._fault(name, f"must be text, not {value!r}")
        return None

    def flag(self, name: str) -> None:
        value = self._value(name)
        if value is not None and not isinstance(value, bool):
            self._fault(name, f"must be true or false, not {value!r}")

    def number(self, name: str) -> float | None:
        value = self._value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fault(name, f"must be a number, not {value!r}")
            return None
        if not 0 <= value <= MOST:  # nor is nan
            is_short = isinstance(value, float) or value.bit_length() < 64
            told = repr(value) if is_short else "a larger one"
            self._fault(name, f"must be a number from 0 to {MOST:,}, not {told}")
            return None
        return float(value)

    def _value(self, name: str) -> Any:
        value: Any = self._data
        seen: list[str] = []
        for key in name.split("."):
            if not isinstance(value, Mapping):
                return self._fault(".".join(seen), f"must have fields, not be {value!r}")
            seen.append(key)
            value = value.get(key)
            if value is None:
                return None
        return value

    def _fault(self, name: str, why: str) -> None:
        """Note a mistake, once; the field counts as absent.

        Raises:
            ManifestError: The manifest names a class.
        """
        fault = ManifestError(self._path, why, line=self._lines.get(name), field=name)
        if is_reference(str(self._data.get("class"))):
            raise fault
        if fault.message not in self.warnings:
            self.warnings.append(fault.message)


def is_reference(text: str) -> bool:
    """Whether it is written `package.module:attribute`."""
    module, colon, attribute = text.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    return bool(colon) and all(part.isidentifier() for part in parts)


def app_reference(text: str) -> str | None:
    """Return the `module:attribute` that a text names, also by a path; None when it names none.

    `server/app.py`, `server/app.py:app` and `server.app` are `server.app:app`.
    """
    place, colon, attribute = text.partition(":")
    is_path = place.endswith(".py")
    if not (is_path or "." in place or colon):
        return None
    module = place.removesuffix(".py").removeprefix("./").replace("/", ".")
    called = attribute.removesuffix("()")
    reference = f"{module}:{called if colon else 'app'}"
    return reference + attribute[len(called) :] if is_reference(reference) else None


def _load(path: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping, and the line (from 1) of every field by its dotted name."""
    import yaml  # here: the daemon's API never needs it

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
    """Count the values that a node spells, each alias and merge (`<<`) as what it stands for.

    A few lines can spell a terabyte, and an alias within its own anchor has no end.
    """
    if id(node) not in counted:
        counted[id(node)] = math.inf  # while it is counted: whoever meets it is within it
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
