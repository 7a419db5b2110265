# SPDX-License-Identifier: Apache-2.0
"""Which folders of sockets go, and that nobody's goes while he is about to use it."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from openenvd.schema.layout import Layout, socket_folders_outside
from openenvd.server.housekeeping import collect_abandoned, held


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, in the temporary folder, where such a folder is."""
    made = Layout(Path("/" + "deep/" * 30)).sockets
    made.mkdir(mode=0o700)
    yield made
    for path in made.iterdir() if made.exists() else ():
        path.unlink()
    if made.exists():
        made.rmdir()


Bind = Callable[..., socket.socket]


@pytest.fixture
def bind() -> Iterator[Bind]:
    with ExitStack() as stack:

        def made(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            listener.bind(str(path))
            listener.listen(0)
            return listener

        yield made


@pytest.mark.parametrize("sockets", [True, False], ids=["of dead sockets", "empty"])
def test_a_folder_without_a_listener_goes(folder: Path, bind: Bind, sockets: bool) -> None:
    assert folder in socket_folders_outside()
    if sockets:
        bind(folder / "daemon.sock").close()
        bind(folder / "fork-0.sock", socket.SOCK_SEQPACKET).close()
    assert collect_abandoned([folder]) == [folder]
    assert not folder.exists()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_folder_with_a_listening_socket_is_left_alone(
    folder: Path, bind: Bind, kind: socket.SocketKind
) -> None:
    bind(folder / "a.sock").close()
    bind(folder / "b.sock", kind)
    assert collect_abandoned([folder]) == []
    assert sorted(path.name for path in folder.iterdir()) == ["a.sock", "b.sock"]


def test_a_full_backlog_counts_as_listening(folder: Path, bind: Bind) -> None:
    bind(folder / "busy.sock")
    with ExitStack() as stack:
        code = 0
        while code == 0:
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.setblocking(False)
            code = client.connect_ex(str(folder / "busy.sock"))
        assert collect_abandoned([folder]) == []


def test_a_folder_with_anything_but_sockets_or_that_is_a_link_or_locked_stays(
    folder: Path, bind: Bind, tmp_path: Path
) -> None:
    with held(folder):
        assert collect_abandoned([folder]) == []
    (tmp_path / "link").symlink_to(folder)
    assert collect_abandoned([tmp_path / "link"]) == []
    bind(folder / "daemon.sock").close()
    (folder / "letter").write_text("dear")
    assert collect_abandoned([folder]) == []
    assert (folder / "daemon.sock").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_stays(folder: Path) -> None:
    os.chown(folder, 12345, -1)
    assert collect_abandoned([folder]) == []
    os.chown(folder, 0, -1)


def test_a_folder_removed_at_its_lock_is_made_again_once(folder: Path) -> None:
    with pytest.raises(FileNotFoundError), held(folder):
        raise FileNotFoundError
    has_it = threading.Event()

    def second() -> None:
        with held(folder):
            assert folder.exists()
            has_it.set()

    with held(folder):
        thread = threading.Thread(target=second)
        thread.start()
        folder.rmdir()
    assert has_it.wait(10)
    thread.join()
