# SPDX-License-Identifier: Apache-2.0
"""An environment whose reset prints 200,000 lines at once."""

import os
from typing import Any

from openenvd.env_host.bundled.echo.environment import EchoEnvironment, EchoObservation

LINES = 200_000
COLOURED = "\x1b[1;31mred and bold\x1b[0m, \x1b[38;5;46mgreen\x1b[0m, plain\x1b]0;title\x07\n"


class Flood(EchoEnvironment):
    """Echo, with a reset that prints much."""

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> EchoObservation:
        numbered = "".join(f"line {number} of {LINES}\n" for number in range(LINES))
        text = memoryview((numbered + "10 %\r20 %\r30 %\n" + "x" * 500 + "\n" + COLOURED).encode())
        while text:
            text = text[os.write(1, text) :]
        return super().reset(seed, episode_id, **kwargs)
