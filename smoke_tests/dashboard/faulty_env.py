# SPDX-License-Identifier: Apache-2.0
"""An environment that fails in the way that a test asks for."""

import time
from pathlib import Path
from typing import Any

from openenvd.env_host.bundled.echo.environment import EchoAction, EchoEnvironment, EchoObservation

LICENCE = Path(__file__).with_name("licence")


class Faulty(EchoEnvironment):
    """Echo, whose sessions need a file, and whose step hangs when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        if not LICENCE.exists():
            raise OSError("there is no licence")

    def step(
        self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any
    ) -> EchoObservation:
        if action.message == "hang":
            time.sleep(3600)
        return super().step(action)
