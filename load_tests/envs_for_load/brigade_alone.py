# SPDX-License-Identifier: Apache-2.0
"""The brigade in one process, as the original was at first: codecs and buffer on one event loop."""

import itertools
from typing import Any

from openenvd.env_host.bundled.brigade.environment import BrigadeEnvironment
from openenvd.env_host.bundled.brigade.mixing import Brigade
from openenvd.env_host.shared_state.connection import Methods, StateProxy
from openenvd.env_host.shared_state.process import methods_of

_methods = methods_of(Brigade())
_numbers = itertools.count(1)


class WorldHere(StateProxy):
    """The shared state in the same process: for comparison only."""

    def __init__(self) -> None:
        Methods.__init__(self, self.call)
        self._number = next(_numbers)

    async def call(self, method: str, body: Any = None, /, **arguments: Any) -> Any:
        arguments.pop("within_seconds", None)
        return _methods[method].call(self._number, arguments, body)


class BrigadeAlone(BrigadeEnvironment):
    """All singers in one process."""

    SHARED_STATE = False

    def __init__(self) -> None:
        self.world = WorldHere()
        super().__init__()
