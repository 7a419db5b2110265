# SPDX-License-Identifier: Apache-2.0
"""What the user told pip is told to uv, unless uv was told something itself."""

from pathlib import Path

import pytest

from openenvd.environments.preparation import uv
from openenvd.environments.preparation.uv import uv_variables

MIRROR = "https://mirror.example/simple"


@pytest.fixture(autouse=True)
def no_files_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        uv, "SYSTEM_FILES", (tmp_path / "etc" / "pip.conf", tmp_path / "etc" / "uv.toml")
    )
    monkeypatch.setattr("sys.prefix", str(tmp_path / "prefix"))


def environ(tmp_path: Path, **variables: str) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "xdg"), **variables}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_pips_variables_become_uvs(tmp_path: Path) -> None:
    answer = uv_variables(
        environ(
            tmp_path,
            PIP_INDEX_URL=MIRROR,
            PIP_EXTRA_INDEX_URL="https://a/simple\n https://b/simple",
            PIP_FIND_LINKS="/wheels /more",
            PIP_CERT="/ca.pem",
            PIP_TRUSTED_HOST="a b",
        )
    )
    assert answer == {
        "UV_DEFAULT_INDEX": MIRROR,
        "UV_INDEX": "https://a/simple https://b/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_INSECURE_HOST": "a b",
    }


def test_pips_files_are_read_in_its_order_and_variables_win(tmp_path: Path) -> None:
    write(tmp_path / "etc" / "pip.conf", "[global]\nindex-url = https://machine/\ncert = /ca\n")
    write(tmp_path / ".config" / "pip" / "pip.conf", "[global]\nindex-url = https://user/\n")
    told = uv_variables(environ(tmp_path))
    assert told == {"UV_DEFAULT_INDEX": "https://user/", "SSL_CERT_FILE": "/ca"}
    assert uv_variables(environ(tmp_path, PIP_INDEX_URL=MIRROR))["UV_DEFAULT_INDEX"] == MIRROR


def test_a_named_file_is_read_and_devnull_reads_none(tmp_path: Path) -> None:
    write(tmp_path / "mine.conf", f"[global]\nindex-url = {MIRROR}\n")
    named = environ(tmp_path, PIP_CONFIG_FILE=str(tmp_path / "mine.conf"))
    assert uv_variables(named) == {"UV_DEFAULT_INDEX": MIRROR}
    write(tmp_path / ".pip" / "pip.conf", f"[global]\nindex-url = {MIRROR}\n")
    assert uv_variables(environ(tmp_path, PIP_CONFIG_FILE="/dev/null")) == {}


@pytest.mark.parametrize("variable", ["UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_FIND_LINKS"])
def test_uvs_own_index_stands(tmp_path: Path, variable: str) -> None:
    answer = uv_variables(
        environ(tmp_path, PIP_INDEX_URL=MIRROR, PIP_CERT="/ca", **{variable: "https://own/"})
    )
    assert answer == {"SSL_CERT_FILE": "/ca"}


PIP, UV = ".pip/pip.conf", ".config/uv/uv.toml"
SECTIONS = "[install]\nindex_url = https://install/\n[global]\nindex-url = https://global/\n"


@pytest.mark.parametrize(
    ("file", "text", "variables", "expected"),
    [
        (PIP, "", {}, {}),
        (PIP, SECTIONS, {}, {"UV_DEFAULT_INDEX": "https://install/"}),
        (PIP, "index-url without a section\n", {}, {}),  # a broken file is passed over
        (UV, "not = = toml", {}, {}),
        (UV, "index-url = 'https://own/'", {"PIP_INDEX_URL": MIRROR}, {}),  # uv's own stands
        (UV, "[[index]]\nurl = 'https://own/'", {"PIP_INDEX_URL": MIRROR}, {}),
        (PIP, "", {"PIP_NO_INDEX": "true"}, {"UV_NO_INDEX": "1"}),
        (PIP, "", {"PIP_NO_INDEX": "0"}, {}),
    ],
)
def test_files_and_variables_become_variables_of_uv(
    tmp_path: Path, file: str, text: str, variables: dict[str, str], expected: dict[str, str]
) -> None:
    write(tmp_path / file, text)
    assert uv_variables(environ(tmp_path, **variables)) == expected
