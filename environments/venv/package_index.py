# SPDX-License-Identifier: Apache-2.0
"""Where packages come from: pip's settings, translated for uv.

Many machines are set up for pip alone (a mirror, a folder of wheels, a company's certificate), and
uv reads none of it. A setting of uv itself takes precedence.

    pip's files, in pip's order ──┐
    PIP_* variables ──────────────┴▶ pip_settings ─▶ uv_variables ─▶ the environment of uv
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
# Any of these is the user's own setting of uv's index.
_UV_INDEX_VARIABLES = {
    "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS",
    "UV_NO_INDEX",
}  # fmt: skip
_UV_INDEX_KEYS = {
    "index", "index-url", "extra-index-url", "find-links", "no-index",
}  # fmt: skip
SYSTEM_FILES = (Path("/etc/pip.conf"), Path("/etc/uv/uv.toml"))  # pip's, uv's
_PIP_SECTIONS = ("global", "install")  # the later wins
_COMMA_SEPARATED = {"find-links"}  # where pip, and uv elsewhere, has blanks
_MIN_TIMEOUT_SECONDS = 30  # uv's own default; a shorter one of pip's is meant for something else


def uv_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What to add to the environment of uv so that it finds packages as pip does."""
    environ = os.environ if environ is None else environ
    settings = pip_settings(environ)
    if _UV_INDEX_VARIABLES & set(environ) or _uv_files_name_an_index(environ):
        settings = {name: settings[name] for name in settings if name not in _INDEX_OPTIONS}
    found = {_VARIABLE_OF_OPTION[name]: _value(name, value) for name, value in settings.items()}
    return {name: value for name, value in found.items() if value and name not in environ}


def pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What pip would go by, of the options that matter here: files first, variables over them."""
    settings: dict[str, str] = {}
    for path in pip_files(environ):
        settings |= _read_pip_file(path)
    for name, value in environ.items():
        if name.startswith("PIP_"):
            settings |= _known(name.removeprefix("PIP_").lower().replace("_", "-"), value)
    return settings


def pip_files(environ: Mapping[str, str]) -> list[Path]:
    """pip's configuration files in the order in which it reads them; the later wins."""
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


def _read_pip_file(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return {}  # pip itself complains about a broken one
    settings: dict[str, str] = {}
    for section in _PIP_SECTIONS:
        if parser.has_section(section):
            for name, value in parser.items(section):
                settings |= _known(name.lower().replace("_", "-"), value)
    return settings


def _known(name: str, value: str) -> dict[str, str]:
    name = _ALIASES.get(name, name)
    return {name: value} if name in _VARIABLE_OF_OPTION else {}


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
    return any(_names_an_index(_read_toml(path)) for path in files)


def _names_an_index(settings: dict[str, Any]) -> bool:
    pip = settings.get("pip")
    return bool(_UV_INDEX_KEYS & set(settings)) or (isinstance(pip, dict) and _names_an_index(pip))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        import tomllib  # 2 MB, and hardly anybody has such a file

        return tomllib.loads(text)
    except (OSError, ValueError):
        return {}
