# SPDX-License-Identifier: Apache-2.0
"""An environment that keeps 20 MB of each step."""

from typing import Any

from openenvd.env_host.bundled.echo.environment import EchoAction, EchoEnvironment, EchoObservation

kept: list[bytes] = []


class Growing(EchoEnvironment):
    """Echo, until its process is killed for memory."""

    def step(
        self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any
    ) -> EchoObservation:
        kept.append(b"1" * (20 << 20))
        return super().step(action)
