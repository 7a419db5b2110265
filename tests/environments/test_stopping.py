# SPDX-License-Identifier: Apache-2.0
"""How replicas are waited for together: real run files and sockets, at which the tests answer."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import Queue

import pytest

from openenvd.environments import run_files
from openenvd.environments.run_files import RunFile
from openenvd.schema.layout import Layout
from openenvd.system.text.json_lines import encode_line

from .conftest import write_run_file

SECONDS = 30.0


class Shim:
    def __init__(self, layout: Layout, folder: Path, ordinal: int, stack: ExitStack) -> None:
        self.id = f"sample-{ordinal}"
        path = str(folder / f"{ordinal}.sock")
        write_run_file(layout.run_dir(self.id), ordinal=ordinal, number=ordinal, socket_path=path)
        self._listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.bind(path)
        self._listener.listen()
        self._stack = stack

    def accept(self) -> socket.socket:
        self._listener.settimeout(SECONDS)
        return self._stack.enter_context(self._listener.accept()[0])

    def end(self, link: socket.socket) -> None:
        self._listener.close()
        link.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def shims(tmp_path: Path) -> Iterator[list[Shim]]:
    with ExitStack() as stack:
        yield [Shim(Layout(tmp_path), tmp_path, ordinal, stack) for ordinal in range(3)]


@pytest.fixture
def replicas(shims: list[Shim], tmp_path: Path) -> list[RunFile]:
    return run_files.all_of(Layout(tmp_path).runs)


def say(link: socket.socket, sessions: int) -> None:
    link.sendall(encode_line({"event": "status", "sessions": sessions}))


def test_the_sessions_of_all_replicas_are_told_while_one_has_not_ended(
    shims: list[Shim], replicas: list[RunFile]
) -> None:
    told: Queue[tuple[str, int]] = Queue()
    args = ([each.run_dir for each in replicas], SECONDS, lambda *sessions: told.put(sessions))
    ending = threading.Thread(target=run_files.stop_replicas, args=args)
    ending.start()
    links = [shim.accept() for shim in shims]
    say(links[2], 4)
    assert told.get(timeout=SECONDS / 2) == (shims[2].id, 4)
    shims[2].end(links[2])
    while (news := told.get(timeout=SECONDS / 2)) == (shims[2].id, 4):
        pass  # again
    assert news == (shims[2].id, 0)
    for shim, link in zip(shims[:2], links, strict=False):
        shim.end(link)
    ending.join(SECONDS)
    assert not ending.is_alive()
