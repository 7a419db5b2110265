# SPDX-License-Identifier: Apache-2.0
"""Where packages come from: pip's settings, translated for uv.

Many machines are set up for pip alone (a mirror, a folder of wheels, a company's certificate), and
uv reads none of it. A setting of uv itself takes precedence.

    pip's files, in pip's order, and then PIP_* variables ─▶ uv_variables ─▶ the environment of uv
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..sources.needs import read_toml

# pip's option → uv's variable.
_VARIABLE_OF_OPTION = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
}
_ALIASES = {"default-timeout": "timeout", "pypi-url": "index-url"}
_INDEX_OPTIONS = {"index-url", "extra-index-url", "find-links", "no-index"}
# Any of these is the user's own setting of uv's index: in its file, or as a variable.
_UV_INDEX_KEYS = {"index", "index-url", "extra-index-url", "find-links", "no-index"}
_UV_INDEX_VARIABLES = {
    "UV_DEFAULT_INDEX",
    *(f"UV_{key.upper().replace('-', '_')}" for key in _UV_INDEX_KEYS),
}
SYSTEM_FILES = (Path("/etc/pip.conf"), Path("/etc/uv/uv.toml"))  # pip's, uv's
_PIP_SECTIONS = ("global", "install")  # the later wins
_COMMA_SEPARATED = {"find-links"}  # where pip, and uv elsewhere, has blanks
_MIN_TIMEOUT_SECONDS = 30  # uv's own default; a shorter one of pip's is meant for something else


def uv_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What to add to the environment of uv so that it finds packages as pip does."""
    environ = os.environ if environ is None else environ
    has_own = bool(_UV_INDEX_VARIABLES & set(environ)) or _uv_files_name_an_index(environ)
    found = {}
    for name, value in _pip_settings(environ):
        option = name.lower().replace("_", "-")
        option = _ALIASES.get(option, option)
        if option in _VARIABLE_OF_OPTION and not (has_own and option in _INDEX_OPTIONS):
            found[_VARIABLE_OF_OPTION[option]] = _value(option, value)
    return {name: value for name, value in found.items() if value and name not in environ}


def _pip_settings(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what pip would go by; of one name, the last counts."""
    for path in pip_files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # pip itself complains about a broken one
        for section in filter(parser.has_section, _PIP_SECTIONS):
            yield from parser.items(section)
    for name, value in environ.items():
        if name.startswith("PIP_"):
            yield name.removeprefix("PIP_"), value


def pip_files(environ: Mapping[str, str]) -> list[Path]:
    """Pip's configuration files in the order in which it reads them; the later wins."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = Path(environ.get("HOME") or Path.home())
    system = environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path(folder) / "pip" / "pip.conf" for folder in system.split(os.pathsep) if folder]
    files += [SYSTEM_FILES[0], home / ".pip" / "pip.conf", config / "pip" / "pip.conf"]
    if sys.platform == "darwin":
        files.append(home / "Library" / "Application Support" / "pip" / "pip.conf")
    files.append(Path(sys.prefix) / "pip.conf")
    return [*files, Path(named)] if named else files


def _value(name: str, value: str) -> str:
    parts = value.split()
    if name == "no-index":
        return "1" if value.strip().lower() in ("1", "true", "yes", "on") else ""
    if name == "timeout":
        seconds = int(float(value)) if value.replace(".", "", 1).isdigit() else 0
        return str(seconds) if seconds > _MIN_TIMEOUT_SECONDS else ""
    return ("," if name in _COMMA_SEPARATED else " ").join(parts)


def _uv_files_name_an_index(environ: Mapping[str, str]) -> bool:
    home = Path(environ.get("HOME") or Path.home())
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    named = environ.get("UV_CONFIG_FILE")
    files = [Path(named)] if named else [config / "uv" / "uv.toml", SYSTEM_FILES[1]]
    return any(_names_an_index(read_toml(path)) for path in files)


def _names_an_index(settings: dict[str, Any]) -> bool:
    pip = settings.get("pip")
    return bool(_UV_INDEX_KEYS & set(settings)) or (isinstance(pip, dict) and _names_an_index(pip))
