# SPDX-License-Identifier: Apache-2.0
"""The installation that this process runs from, and a check whether it is unchanged.

A process continues when its files are removed or replaced (`uv cache clean`, `pip install -U`, a
deleted virtual environment), but cannot import or start anything more from them.

A missing extra is installed from the source of this package itself, such as a clone, because no
package index has that. The installer has recorded the source in `direct_url.json`
(https://packaging.python.org/en/latest/specifications/direct-url/).
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_PACKAGE = Path(__file__).parents[2]
_FILE = "__init__.py"  # written again by every installation


def mark() -> dict[str, str | list[int]]:
    """Return the folder of this installation, and values that a later one there does not have."""
    return {"folder": str(_PACKAGE), "file": _identify(_PACKAGE)}


def is_removed() -> bool:
    """Return whether the files of this installation are gone, as they are during an update."""
    return not (_PACKAGE / _FILE).exists()


def is_as_it_was(marked: object) -> bool:
    """Return whether the installation of a `mark` is still there; False for any other value."""
    if not isinstance(marked, dict) or not isinstance(folder := marked.get("folder"), str):
        return False
    try:
        return _identify(Path(folder)) == marked.get("file")
    except OSError:
        return False


def _identify(folder: Path) -> list[int]:
    found = (folder / _FILE).stat()
    return [found.st_ino, found.st_mtime_ns]


_NAME = "openenvd"
_OF_UVX = re.compile(r"(archive|environments)-v\d+")  # folders of uv's cache
_UV_RECEIPT = "uv-receipt.toml"  # `uv tool install` writes it into the environment it makes


def install_command(extra: str) -> str:
    """Return a command line that installs an extra, or several, for this very Python.

    `/venv/bin/python -m pip install '/home/me/openenvd[gateway]'`, or what `uv tool install` was
    given with the extra added. Under `uvx`, whose environments are not to be changed, it is the
    beginning of a command line that runs openenvd with the extra.
    """
    import tomllib  # takes 2 MB

    # The build in a clone leaves an `openenvd.egg-info` there, which comes first for `python -c`.
    from importlib import metadata  # takes 4 ms

    found = (each.read_text("direct_url.json") for each in metadata.distributions(name=_NAME))
    origin = next((json.loads(text) for text in found if text), None)
    own = shlex.quote(sys.executable)  # a daemon's may differ from the shell's
    if is_of_uvx():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"uvx -p {version} --from {shlex.quote(requirement(extra, origin))} {_NAME}"
    if (receipt := Path(sys.prefix) / _UV_RECEIPT).is_file():
        tool = tomllib.loads(receipt.read_text())["tool"]
        others = [each["name"] for each in tool["requirements"] if each["name"] != _NAME]
        known = [e for r in tool["requirements"] if r["name"] == _NAME for e in r.get("extras", ())]
        wanted = shlex.quote(requirement(",".join(dict.fromkeys([*known, extra])), origin))
        more = "".join(f" --with {shlex.quote(each)}" for each in others)
        more += f" -p {shlex.quote(tool['python'])}" if "python" in tool else ""
        return f"uv tool install {wanted}{more}"
    # `uv venv` makes environments without pip
    program = f"{own} -m pip install" if find_spec("pip") else f"uv pip install -p {own}"
    return f"{program} {shlex.quote(requirement(extra, origin))}"


def is_of_uvx() -> bool:
    """Return whether this Python's environment is one that `uvx` keeps in its cache."""
    return any(map(_OF_UVX.fullmatch, Path(sys.prefix).parts))


def requirement(extra: str, origin: dict[str, Any] | None) -> str:
    """Return pip's requirement; `origin` is `direct_url.json`, or None for a package index."""
    wanted = f"{_NAME}[{extra}]"
    if origin is None:
        return wanted
    url = str(origin["url"])
    if "dir_info" in origin:
        return f"{unquote(urlsplit(url).path)}[{extra}]"
    vcs = origin.get("vcs_info")
    return f"{wanted} @ {vcs['vcs']}+{url}" if vcs else f"{wanted} @ {url}"
