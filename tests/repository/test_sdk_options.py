# SPDX-License-Identifier: Apache-2.0
"""The SDK's keyword arguments are the options that are declared."""

import subprocess
import sys
from pathlib import Path

from openenvd.client import options

SCRIPT = Path(__file__).with_name("sdk_options.py")


def test_the_module_is_the_one_that_is_generated() -> None:
    command = [sys.executable, str(SCRIPT), "--print"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert Path(options.__file__).read_text() == printed, (
        "write it again: python tests/repository/sdk_options.py"
    )
