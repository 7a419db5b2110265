# SPDX-License-Identifier: Apache-2.0
"""The examples on every command's help page run.

Each runs alone, in the folder of `pages.py` that has `my_env` and `my_policies.py`, with a daemon
that has the environments it names. The test replaces placeholders for the reader's own ids and
ports (`IDS`, `PORT`), and shortens measurements (`SHORTER`). A command that follows until it is
interrupted is interrupted after its first output. `NOT_RUN` has the rest.
"""

import select
import shlex
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from openenvd.cli.main import cli, example_lines

from .conftest import Machine, free_port, new_machine
from .pages import make_folder

pytestmark = pytest.mark.timeout(180)


def examples(command: click.Command | None) -> Iterator[str]:
    yield from example_lines(command) if command is not None else ()
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from examples(command.get_command(context, name))


LINES = list(dict.fromkeys(examples(cli)))
# Why commands do not run here, by words that they have in common.
NOT_RUN = {
    "openenv up --service": "needs systemd; tests/cli/test_service.py has a stand-in",
    "--watch": "needs a terminal, or changes; tests/cli/test_watch.py, replicas/test_updates.py",
    "openenv image build": "needs Docker; test_images.py builds images",
    "--provider docker": "needs Docker; test_docker.py runs the same line of the README",
    "--provider slurm": "needs Slurm; test_slurm.py runs the same line of docs/how-to/slurm.md",
}
ENDLESS = {"openenv up --foreground", "openenv logs -f my_env"}
IDS, PORT = ("7f3a91c2", "9b1d0c44"), "9000"  # ids of launches; a port without a listener
# Options that follow the example's own, and override them.
SHORTER = {
    "openenv bench": "--requests-grid 4 --wait-grid 0 --reps 1",
    "openenv test": "--sessions 20",
}


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with new_machine(tmp_path_factory.mktemp("examples") / "home") as machine:
        machine.environ |= {"API_KEY": "not-a-real-one"}
        make_folder(folder_of(machine))
        yield machine
        machine.ok("down", "--all")  # even if the last example has stopped the daemon


def folder_of(machine: Machine) -> Path:
    return machine.home.parent / "folder"


def is_run(line: str) -> bool:
    return not any(words in line for words in NOT_RUN)


def make_ready(machine: Machine, words: list[str]) -> None:
    """Launch the environment of a command unless it runs, and end what the command would meet."""
    folder, command = folder_of(machine), words[1]
    if command == "up":
        machine.ok("stop")
    if "--out" in words:
        shutil.rmtree(folder / words[words.index("--out") + 1], ignore_errors=True)
    if words[1:3] == ["rollout", "show"] and not (folder / words[3]).exists():
        few = ("--launch", "--episodes", "2", "--out", words[3])
        machine.ok("rollout", "echo", *few, cwd=folder)
    if command == "gateway":
        machine.ok("launch", "./my_env", "--gateway", cwd=folder)
        return
    wanted = {*words} & {"echo", "benchmark", "my_env"} if command != "launch" else set()
    if "--launch" in words:  # it launches an environment that must not run yet
        for name in wanted & {each["name"] for each in machine.status()["environments"]}:
            machine.ok("down", name)
    elif wanted:
        for name in wanted - {each["name"] for each in machine.status()["environments"]}:
            machine.ok("launch", "./my_env" if name == "my_env" else name, cwd=folder)
    if "--replica" in words:
        machine.ok("down", "my_env")  # so that replicas are numbered from 0
        machine.ok("launch", "./my_env", "--replicas", "3", cwd=folder)


def as_typed(machine: Machine, words: list[str]) -> list[str]:
    """Replace placeholders by the test's own values."""
    for number, word in enumerate(words):
        if word == PORT:
            words[number] = str(free_port())
        if word in IDS:
            launch = machine.ok("launch", "--async", "echo", "--name", f"of-{word}")
            words[number] = launch.out.strip()
            if words[1] in ("logs", "retry"):
                machine.ok("wait", words[number])
    return words[1:]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("line", [line for line in LINES if is_run(line)])
def test_an_example_runs(helped: Machine, line: str) -> None:
    words = shlex.split(line)
    make_ready(helped, words)
    shorter = [more for begin, more in SHORTER.items() if line.startswith(begin)]
    words = [*as_typed(helped, words), *shlex.split(" ".join(shorter))]
    if line not in ENDLESS:
        answer = helped.ok(*words, cwd=folder_of(helped))
        if "--async" in words:  # no other request changes its environment until it has ended
            helped.ok("wait", answer.out.strip())
        return
    process = helped.start(*words)
    printed = [stream for stream in (process.stdout, process.stderr) if stream is not None]
    assert select.select(printed, [], [], 60)[0], "it prints nothing"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode in (0, 130), err


def test_whatever_is_not_run_is_an_example() -> None:
    assert all(any(words in line for line in LINES) for words in NOT_RUN)
    assert set(LINES) >= ENDLESS
