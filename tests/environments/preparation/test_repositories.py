# SPDX-License-Identifier: Apache-2.0
"""Sources that are git repositories, from a real `git daemon`, with the user's own git settings."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from openenvd.environments.preparation import venv_cleanup
from openenvd.environments.preparation.checkout import (
    checkout,
    fetched_commits,
    resolve_in_checkout,
)
from openenvd.environments.sources import repository
from openenvd.environments.sources.repository import SPACES, parse_repository, pin
from openenvd.schema.errors import PreparationFailed, UnknownSource
from openenvd.schema.layout import Layout
from openenvd.schema.spec import name_of_source, without_ref

from ..conftest import write_run_file
from .test_venvs import note_use_a_day_ago

# Nobody resolves `.test`, so git's own `insteadOf` leads the address to the daemon.
SOURCE = "git+https://git.test/my-envs.git"
Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Run git in a repository with a branch, two tags and the files of an environment."""
    for kind in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{kind}_NAME", "a")
        monkeypatch.setenv(f"GIT_{kind}_EMAIL", "a@git.test")
    folder = tmp_path / "served" / "my-envs.git"
    (folder / "one").mkdir(parents=True)
    (folder / "one" / "openenv.yaml").write_text("name: one\n")

    def run(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", folder, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    run("init", "--quiet", "--initial-branch=main")
    run("add", ".")
    run("commit", "--quiet", "--message=first")
    run("tag", "light")
    run("tag", "--annotate", "--message=x", "v1/rc+1")
    return run


@pytest.fixture
def server(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    base = tmp_path / "served"
    command = ["git", "daemon", "--export-all", "--listen=127.0.0.1", f"--port={port}"]
    process = subprocess.Popen([*command, f"--base-path={base}"], start_new_session=True)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.git://127.0.0.1:{port}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://git.test/")
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    yield process
    with suppress(ProcessLookupError):  # the test has ended it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "home")


@pytest.mark.usefixtures("server")
def test_a_reference_is_pinned_to_its_commit_and_fetched_once(git: Git, layout: Layout) -> None:
    first, said = git("rev-parse", "HEAD"), list[str]()
    for ref in ("", "@main", "@light", "@v1/rc+1", f"@{first}"):
        assert pin(f"{SOURCE}{ref}#subdirectory=one", {}) == f"{SOURCE}@{first}#subdirectory=one"
    git("commit", "--quiet", "--allow-empty", "--message=second")
    assert (
        pin(f"{SOURCE}@main", {}) == f"{SOURCE}@{git('rev-parse', 'main')}" != f"{SOURCE}@{first}"
    )
    with pytest.raises(UnknownSource, match="has no branch or tag 'mai'"):
        pin(f"{SOURCE}@mai", {})
    folder = checkout(f"{SOURCE}@{first}#subdirectory=one", layout, said.append)
    assert folder.parent.name == "my-envs"  # a package may be named after the repository
    assert (folder / "openenv.yaml").read_text() == "name: one\n"
    assert [line for line in said if "fetched in" in line]
    with pytest.raises(PreparationFailed, match="has no folder two") as failed:
        checkout(f"{SOURCE}@{first}#subdirectory=two", layout, said.append)
    assert failed.value.hint == f"openenv launch {SOURCE}@{first}#subdirectory=one"


@pytest.mark.usefixtures("server")
def test_a_repository_without_an_environment_names_its_folders_that_have_one(
    git: Git, tmp_path: Path, layout: Layout
) -> None:
    pinned = pin(SOURCE, {})
    with pytest.raises(UnknownSource) as refused:
        resolve_in_checkout(pinned, checkout(pinned, layout, print))
    assert f"{pinned} has no openenv.yaml and no app" in str(refused.value)
    assert refused.value.hint == f"openenv launch {pinned}#subdirectory=one"
    served = tmp_path / "served" / "my-envs.git"
    for number in range(6):
        (served / "envs" / f"n{number}").mkdir(parents=True)
        (served / "envs" / f"n{number}" / "openenv.yaml").write_text("name: one\n")
    git("add", ".")
    git("commit", "--quiet", "--message=more")
    pinned = pin(f"{SOURCE}#subdirectory=envs", {})
    with pytest.raises(UnknownSource) as refused:
        resolve_in_checkout(pinned, checkout(pinned, layout, print))
    hint = str(refused.value.hint)
    assert "#subdirectory=FOLDER, where FOLDER is one of envs/n0, envs/n1, " in hint
    assert hint.endswith(", envs/n4 and 1 more")


def test_offline_a_commit_that_is_here_is_named_and_launched(
    git: Git, server: subprocess.Popen[bytes], layout: Layout
) -> None:
    pinned = pin(SOURCE, fetched_commits(layout))
    folder = checkout(pinned, layout, print)
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    with pytest.raises(UnknownSource, match=r"git\.test/my-envs\.git cannot be read") as refused:
        pin(SOURCE, fetched_commits(layout))
    assert f"fetched before: {pinned}" in str(refused.value.hint)
    assert checkout(pin(pinned, {}), layout, print) == folder
    with pytest.raises(PreparationFailed, match="cannot be fetched"):
        checkout(f"{SOURCE}@{'0' * 40}", layout, print)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("target", ["/etc/passwd", "../../../x", "loop"])
def test_a_link_that_leads_out_of_the_repository_is_refused(
    git: Git, layout: Layout, tmp_path: Path, target: str
) -> None:
    folder = tmp_path / "served" / "my-envs.git" / "one"
    (folder / "loop").symlink_to(target)
    (folder / "inside").symlink_to("openenv.yaml")
    git("add", ".")
    git("commit", "--quiet", "--message=link")
    with pytest.raises(PreparationFailed, match="has a link that leads out of it: one/loop"):
        checkout(pin(SOURCE, {}), layout, print)
    assert not list(layout.venvs.glob("*/"))


@pytest.mark.usefixtures("server")
def test_a_checkout_is_removed_when_no_replica_uses_it(git: Git, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    layout = Layout(tmp_path / "home")
    folder = checkout(pin(SOURCE, {}), layout, print)
    place = folder.parents[1]
    note_use_a_day_ago(place)
    write_run_file(
        layout.run_dir("one-0-0123"), cwd=str((folder / "one").resolve()), argv=["/usr/bin/python"]
    )
    assert not venv_cleanup.prune(layout)
    assert venv_cleanup.prune(Layout(tmp_path / "other")) == []
    (layout.run_dir("one-0-0123") / "replica.json").unlink()
    note_use_a_day_ago(place)
    [gone] = venv_cleanup.prune(layout)
    assert gone.project == f"https://git.test/my-envs.git@{git('rev-parse', 'HEAD')}"
    assert not folder.exists()


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "2130706433", "localhost", "[::1]", "[::ffff:127.0.0.1]"),
        *("0.0.0.0", "169.254.169.254", "224.0.0.1", "127.0.0.1:8585", "[64:ff9b::7f00:1]"),
        *("100.100.100.200", "[fd00:ec2::254]"),
    ],
)
def test_an_address_of_this_machine_is_never_asked(host: str, layout: Layout) -> None:
    with pytest.raises(UnknownSource, match="an address of this machine or its link"):
        pin(f"git+https://{host}/x", {})
    with pytest.raises(PreparationFailed, match="an address of this machine or its link"):
        checkout(f"git+https://{host}/x@{'0' * 40}", layout, print)


def test_a_repository_that_does_not_answer_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repository, "ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        port = silent.getsockname()[1]
        monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.https://127.0.0.1:{port}/.insteadOf")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://git.test/")
        with pytest.raises(UnknownSource, match="no answer within 1 s"):
            pin(SOURCE, {})
    commands = [f":{port}/"]
    while any(f":{port}/" in command for command in commands):  # they were killed just now
        processes = psutil.process_iter(["cmdline"])
        commands = [" ".join(each.info["cmdline"] or []) for each in processes]


def test_a_host_that_is_not_found_is_no_other_address() -> None:
    for host in ("no-such-host.test", "a..b"):
        with pytest.raises(UnknownSource, match="is not found"):
            pin(f"git+https://{host}/x", {})


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("git+https://", "not the address"),
        ("git+https://h", "not the address"),
        ("hf://org", "not the address"),
        ("hf://org/name/more", "not the address"),
        ("git+https://h/x#subdirectory=../y", "not the address"),
        ("git+https://h/x#subdirectory=/etc", "not the address"),
        ("git+https://h/x#egg=y", "not the address"),
        ("git+https://h/x#subdirectory=%0a", "not the address"),
        ("git+https://h/x/..", "not the address"),
        ("git+https://h:99999/x", "not an address"),
        ("git+https://[::1/x", "not an address"),
        ("git+https://h/x@", "cannot be a branch"),
        ("git+https://h/x@--upload-pack=touch", "cannot be a branch"),
        ("git+https://h/x?service=y", "not the address"),
        ("git+https://secret@h/x", "has a password"),
    ],
)
def test_a_source_that_is_no_repository_is_refused(source: str, why: str) -> None:
    with pytest.raises(UnknownSource, match=why) as refused:
        parse_repository(source)
    assert "secret" not in refused.value.message


@pytest.mark.parametrize(
    ("source", "url", "name", "same"),
    [
        ("hf://org/a@v1", "https://huggingface.co/spaces/org/a", "a", "hf://org/a"),
        ("git+https://h:8/a/b.git@x/y", "https://h:8/a/b.git", "b", "git+https://h:8/a/b.git"),
        ("hf://o/a@x#subdirectory=b/c", f"{SPACES}o/a", "c", "hf://o/a#subdirectory=b/c"),
    ],
)
def test_a_repository_has_an_address_a_name_and_is_the_same_at_each_commit(
    source: str, url: str, name: str, same: str
) -> None:
    found = parse_repository(source)
    assert (found.url, found.source) == (url, source)
    assert (name_of_source(source), without_ref(source)) == (name, same)
