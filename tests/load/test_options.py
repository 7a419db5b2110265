# SPDX-License-Identifier: Apache-2.0
"""What is refused on the command line, in one line, before anything is measured."""

from __future__ import annotations

import sys

import pytest


@pytest.mark.parametrize("value", ["1", "20", "0", "-0.5", "nan", "much"])
def test_how_exactly_to_seek_is_a_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    """No search ends, or begins, with anything else."""
    from load_tests.brigade import main

    monkeypatch.setattr(sys, "argv", ["brigade", f"--step={value}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument --step: {value} is no share" in last


def test_a_quarter_is_a_share() -> None:
    from load_tests.shared.report import share

    assert share("0.25") == 0.25
