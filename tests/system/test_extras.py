# SPDX-License-Identifier: Apache-2.0
"""How a missing extra is installed."""

import shlex
import sys
from pathlib import Path

import pytest

from openenvd.system.files import installation

_VCS = {"vcs": "git", "commit_id": "abc"}


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "openenvd[otel]"),
        ({"url": "file:///home/me/my%20clone", "dir_info": {}}, "/home/me/my clone[otel]"),
        ({"url": "file:///tmp/o.whl", "archive_info": {}}, "openenvd[otel] @ file:///tmp/o.whl"),
        (
            {"url": "https://git.test/o", "vcs_info": _VCS},
            "openenvd[otel] @ git+https://git.test/o",
        ),
    ],
    ids=["index", "folder", "wheel", "git"],
)
def test_an_extra_is_installed_from_where_the_package_came(
    origin: dict[str, object] | None, expected: str
) -> None:
    assert installation.requirement("otel", origin) == expected


@pytest.mark.parametrize(
    ("has_pip", "program"), [(True, "{} -m pip install"), (False, "uv pip install -p {}")]
)
def test_the_command_names_this_python_whatever_the_shells_is(
    monkeypatch: pytest.MonkeyPatch, has_pip: bool, program: str
) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda _name: object() if has_pip else None)
    *words, wanted = shlex.split(installation.install_command("otel"))
    assert words == program.format(sys.executable).split()
    assert "[otel]" in wanted


def test_a_tool_of_uv_is_installed_with_what_it_has_and_uvx_runs_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The environment that `uvx` caches is left as it is."""
    receipt = """[tool]
    requirements = [{name = "openenvd", extras = ["docker"]}, {name = "numpy"}]
    python = "3.12"
    """
    (tmp_path / "uv-receipt.toml").write_text(receipt)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    *words, more, numpy, option, version = shlex.split(installation.install_command("otel"))
    assert words[:3] == ["uv", "tool", "install"]
    assert "[docker,otel]" in words[3]
    assert (more, numpy, option, version) == ("--with", "numpy", "-p", "3.12")
    monkeypatch.setattr(sys, "prefix", "/home/me/.cache/uv/archive-v0/Xy")
    words = shlex.split(installation.install_command("otel"))
    assert (words[0], words[3], words[-1]) == ("uvx", "--from", "openenvd")
    assert "[otel]" in words[4]
