# SPDX-License-Identifier: Apache-2.0
"""The main job: up, launch, status, logs, down; queued, waited for, cancelled."""

import json
import signal
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

from .background import end, read, start, wait_until
from .conftest import OPENENV, PYTHON, Machine, free_port, output_of

SAY_HELLO = Path(__file__).with_name("say_hello.py")
SLOW_TO_START = """
import time
from openenvd.env_host.bundled.echo.environment import EchoEnvironment

class Sample(EchoEnvironment):
    pass

time.sleep(120)
"""


def say_hello(address: str) -> None:
    output_of(PYTHON, SAY_HELLO, address)


def test_launch_from_nothing_starts_the_daemon_and_prints_an_address(machine: Machine) -> None:
    answer = machine.ok("launch", "echo")
    environment = machine.environment("echo")
    assert environment["address"] in answer.out
    say_hello(environment["address"])
    code = textwrap.dedent(answer.out.partition("\n\n")[2])  # runs as it was printed
    assert output_of(PYTHON, "-c", code, env=machine.environ).startswith("{")


def test_interrupting_a_launch_detaches_and_prints_how_to_follow_it(
    machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / "slow_env.py").write_text(SLOW_TO_START)
    machine.ok("up")
    launch = machine.start("launch", "slow_env:Sample", "--name", "slow")
    assert launch.stderr is not None
    launch.stderr.readline()  # the command follows its request now
    launch.send_signal(signal.SIGINT)
    _, err = launch.communicate(timeout=30)
    assert launch.returncode == 130
    assert "openenv logs -f" in err
    [request] = [r for r in machine.status()["requests"] if r["operation"] == "launch"]
    assert request["state"] == "RUNNING"
    machine.ok("cancel", request["id"])


def test_openenvd_is_the_same_command_as_openenv(machine: Machine) -> None:
    other = output_of(OPENENV + "d", "status", "--json", env=machine.environ)
    assert json.loads(other).keys() == machine.status().keys()


SIGNALS_OF_THE_PARENT = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_what_started_the_command_may_ignore_and_block_signals(machine: Machine) -> None:
    below = replace(machine, command=sys.executable)
    answer = below.ok("-c", SIGNALS_OF_THE_PARENT, machine.command, "launch", "echo", "--json")
    say_hello(answer.json["environment"]["address"])
    machine.ok("down", "echo")
    machine.ok("stop")


OF_REPOSITORY = """
from openenvd.env_host.bundled.echo.environment import EchoEnvironment

class Sample(EchoEnvironment):
    pass
"""


def test_a_repository_is_launched_and_updated_and_launched_again_offline(
    machine: Machine, tmp_path: Path
) -> None:
    served = tmp_path / "served" / "envs"
    (served / "one").mkdir(parents=True)
    (served / "one" / "openenv.yaml").write_text("name: one\nclass: sample:Sample\n")
    (served / "one" / "sample.py").write_text(OF_REPOSITORY)

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@git.test")
        return output_of("git", "-C", served, *who, *arguments).strip()

    git("init", "--quiet", "--initial-branch=main")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    port, log = free_port(), tmp_path / "git.log"
    command = ["git", "daemon", "--export-all", "--verbose", "--listen=127.0.0.1", f"--port={port}"]
    daemon = start([*command, f"--base-path={served.parent}"], log)
    wait_until(lambda: "Ready" in read(log), {log: daemon})
    settings = {"COUNT": "1", "KEY_0": f"url.git://127.0.0.1:{port}/.insteadOf"}
    machine.environ |= {f"GIT_CONFIG_{name}": value for name, value in settings.items()}
    machine.environ["GIT_CONFIG_VALUE_0"] = "https://git.test/"
    source = "git+https://git.test/envs#subdirectory=one"
    try:
        machine.ok("launch", source)
        first = git("rev-parse", "HEAD")
        assert machine.environment("one")["source"] == source.replace("#", f"@{first}#")
        git("commit", "--quiet", "--allow-empty", "--message=second")
        assert "updating it to generation 2" in machine.ok("launch", source).text
        assert git("rev-parse", "HEAD") in machine.environment("one")["source"]
        machine.ok("down", "one")
        for more in ("--launch", "--seed=1"):  # then it runs already
            out = f"--out={tmp_path}/out{more}"
            machine.ok("rollout", source, more, out, "--episodes=2", "--max-steps=2")
    finally:
        end(daemon)
    refused = machine.run("launch", source)
    assert refused.code == 2
    assert f"fetched before: git+https://git.test/envs@{git('rev-parse', 'HEAD')}" in refused.text
    machine.ok("launch", source.replace("#", f"@{first}#"))
    assert machine.environment("one")["source"] == source.replace("#", f"@{first}#")
    generations = machine.status("one")["environments"][0]["generations"]
    [serving] = [each for each in generations if each["state"] == "SERVING"]
    assert first in serving["spec"]["source"]
