# SPDX-License-Identifier: Apache-2.0
"""Messages on the user's terminals."""

import os
from pathlib import Path

import pytest

from openenvd.system.text.terminals import write_to_terminals


@pytest.mark.parametrize(("mode", "is_told"), [(0o620, True), (0o600, False)])
def test_a_terminal_gets_a_message_unless_mesg_refuses_them(
    tmp_path: Path, mode: int, is_told: bool
) -> None:
    master, slave = os.openpty()
    try:
        os.fchmod(slave, mode)
        (tmp_path / "7").symlink_to(os.ttyname(slave))
        (tmp_path / "8").symlink_to(tmp_path / "gone")
        (tmp_path / "null").symlink_to("/dev/null")
        write_to_terminals("one\n", [str(tmp_path)])
        os.write(slave, b"two\n")
        assert (b"one" in os.read(master, 100)) is is_told
    finally:
        os.close(master)
        os.close(slave)
