# SPDX-License-Identifier: Apache-2.0
"""An environment whose server holds 400 MB from its start."""

from openenvd.env_host.bundled.echo.environment import EchoEnvironment

HELD = b"1" * (400 << 20)


class Hungry(EchoEnvironment):
    """Echo, in a process that is too large."""
