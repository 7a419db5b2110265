# SPDX-License-Identifier: Apache-2.0
"""`openenv check` and `openenv test`: real trials of a machine, a provider or an environment.

    check --provider NAME   engine ─▶ launch ─▶ session ─▶ down    a line each; the first that fails
                                                                   ends the trial, and says why
    test SOURCE             launch ─▶ test ─▶ report ─▶ down

The environment has a name of its own. It is always taken down, also after a failed step, Ctrl-C, a
signal that ends this command, or a kill of the daemon. A test's environment has one shard, so that
all its sessions are in one process, and that process's memory is theirs.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from ...client.api import DaemonClient
from ...client.errors import ApiRefused, ClientError, NotFound, RequestFailed, SessionError
from ...client.sources import check_source, read_source, working_folder
from ...schema.operation_options import EnvironmentTestOptions
from ...schema.spec import LaunchOptions
from ...schema.states import RequestState
from ...system.text.json_lines import Json
from ...system.text.safe_text import plain
from ...system.text.units import plural
from .. import completion, exit_codes
from ..following import follow_request, run, submit
from ..help_pages import set_option
from ..options import connect, declared_options, given_options, json_option, read_action
from ..output import phrases
from ..output.failures import error_lines
from ..output.output import Output, bad, faint, good

POLL_INTERVAL_SECONDS = 0.2  # between two polls of a launch
SESSION_SECONDS = 30.0
MEMORY_MB = 512  # of the replica: without a limit, a Slurm job may be given a whole node
OPTIONS = ("memory_mb", "gpus", "engine_options")


@click.command()
@click.argument("source", required=False, shell_complete=completion.sources)
@click.option(
    "--provider", metavar="NAME", shell_complete=completion.providers,
    help="Try this provider for real.",
)  # fmt: skip
@declared_options(LaunchOptions, OPTIONS)
@set_option(LaunchOptions, only=("ready_timeout_seconds",))
@json_option
def check(source: str | None, provider: str | None, output: Output, **options: Any) -> int:
    """Check this machine: its performance settings, its providers, and the gateway.

    Each problem has the command that fixes it. The exit code is 1 if a line has a ✗.

    With --provider, check that provider: a replica of `echo`, or of SOURCE, has one session and is
    taken down again. If a step fails, say which, and why. Where nodes pull images, as in
    Kubernetes, SOURCE must be an image: docker://IMAGE.

    Examples:
      # check this machine
      openenv check
      # try a provider
      openenv check --provider slurm --engine-option partition=cpu
    """
    given = given_options(LaunchOptions, options)
    if provider is None:
        if source is not None or given:
            raise click.UsageError("name the --provider to try")
        result = run(connect(output), "check", {})["result"]
        lines, is_good = _lines(dict(result))
        output.answer({**result, "is_good": is_good}, *lines)
        return exit_codes.OK if is_good else exit_codes.FAILED
    here = working_folder()
    payload = {
        "source": read_source(source or "echo", here).text,
        "cwd": str(here),
        "provider": provider,
        "token": "auto",
        "memory_mb": MEMORY_MB,
        **given,
    }
    with ended_by_signals():
        return _Trial(output, payload).run()


def _lines(result: Json) -> tuple[list[str], bool]:
    """Return the findings for people, each problem with its remedy; and whether all is good."""
    needed = {"local", *result.pop("used_providers", ())}
    parts = {
        "providers": result.pop("providers", {}),
        "gateway": {"envoy": gateway} if (gateway := result.pop("gateway", None)) else {},
        "machine": result.pop("machine", {}),
    }
    missing = {title: [n for n, one in of.items() if one["problem"]] for title, of in parts.items()}
    optional = [name for name in missing["providers"] if name not in needed] + missing["gateway"]
    faults = [name for name in missing["providers"] if name in needed] + missing["machine"]
    checked = [line for title, found in parts.items() for line in _checked(title, found, optional)]
    verdict = bad("not all good: see the lines with ✗") if faults else good("local: all good")
    if optional:
        verdict += faint(f"; optional, not working here: {', '.join(optional)}")
    return [*phrases.describe_json(result, indent=""), *checked, "", verdict], not faults


def _checked(title: str, found: dict[str, Json], optional: list[str]) -> list[str]:
    """Return a line for each: it works, or what is missing and which command fixes it."""
    width = max(map(len, found), default=0)
    lines = [f"{title}:"] if found else []
    for name, one in found.items():
        details = [_works(one)] if one["problem"] is None else [one["problem"], one["remedy"]]
        is_good = True if one["problem"] is None else None if name in optional else False
        lines.append(_line(f"{name:{width}}", [*details, *one["notes"]], is_good))
    return lines


def _works(one: Json) -> str:
    return f"works, version {one['version']}" if one["version"] else "works"


def _line(name: str, details: list[str | None], is_good: bool | None) -> str:
    """Return the line of one part; `is_good` is None if it is missing, and optional."""
    mark = faint("-") if is_good is None else good("✓") if is_good else bad("✗")
    return f"  {mark} {name}  {' · '.join(plain(part) for part in details if part)}".rstrip()


class _Missing(ClientError):
    """Raised when the provider cannot be used on this machine."""


@dataclass
class _Trial:
    """Runs one replica on a provider with one session, and takes it down."""

    output: Output
    payload: Json
    name: str = field(default_factory=lambda: f"check-{secrets.token_hex(3)}")
    steps: list[Json] = field(default_factory=list)

    def run(self) -> int:
        client = connect(self.output)
        report = {"provider": self.payload["provider"], "steps": self.steps}
        try:
            if self._step("engine", lambda: self._engine(client)):
                self._try(client)
        except ClientError as exc:  # the daemon has exited meanwhile
            report |= exc.to_json()
            self.output.note(*error_lines(exc))
            return exit_codes.of_error(exc)
        finally:
            self.output.json(report)
        is_good = all(step["problem"] is None for step in self.steps)
        return exit_codes.OK if is_good else exit_codes.FAILED

    def _try(self, client: DaemonClient) -> None:
        try:
            if self._step("launch", lambda: self._launch(client)):
                self._step("session", lambda: self._session(client))
        finally:
            self._step("down", lambda: take_down(connect(self.output), self.name))

    def _step(self, step: str, take: Callable[[], list[str]]) -> bool:
        """Take a step and print its outcome; returns whether it succeeded."""
        started = time.monotonic()
        problem = remedy = None
        log: list[str] = []  # its last lines
        try:
            details: list[str | None] = [*take()]
        except (RequestFailed, ApiRefused, SessionError, _Missing) as exc:
            problem, *log = exc.message.splitlines()
            remedy = exc.hint
            request: Json = exc.request if isinstance(exc, RequestFailed) else {"operation": None}
            if request["operation"] == "launch" and remedy is not None and self.name in remedy:
                # If the environment never started, only its launch has a log.
                remedy = f"openenv logs {phrases.short_id(request['id'])}"
            details = [problem, remedy]
        self.output.result(_line(f"{step:7}", details, problem is None))
        self.output.result(*(faint(f"    │ {plain(line)}") for line in log))
        seconds = round(time.monotonic() - started, 3)
        self.steps.append({"step": step, "seconds": seconds, "problem": problem, "remedy": remedy})
        return problem is None

    def _engine(self, client: DaemonClient) -> list[str]:
        provider = self.payload["provider"]
        found = run(client, "check", {"provider": provider})["result"]["providers"][provider]
        if found["problem"] is not None:
            raise _Missing(found["problem"], found["remedy"])
        return [_works(found), *found["notes"]]

    def _launch(self, client: DaemonClient) -> list[str]:
        request = submit(client, "launch", {**self.payload, "name": self.name}, {})
        shown = ""
        while request["state"] in ("PENDING", "RUNNING"):
            time.sleep(POLL_INTERVAL_SECONDS)
            request = client.request(request["id"])
            replicas = client.environment(self.name)["replicas"]
            reason = next((each["message"] for each in replicas if each.get("message")), shown)
            if reason != shown:  # the provider's reason why the replica is not ready yet
                shown = reason
                self.output.note(faint(f"    {plain(shown)}"))
        if request["state"] != "SUCCEEDED":
            raise RequestFailed(request)
        return [f"ready at {request['result']['environment']['address']}"]

    def _session(self, client: DaemonClient) -> list[str]:
        from ...client.session import Session

        base_url = client.base_url(self.name)["base_url"]
        started = time.monotonic()
        with Session(base_url, answer_timeout=SESSION_SECONDS, name=self.name) as session:
            session.reset()
        return [f"reset in {1000 * (time.monotonic() - started):.0f} ms"]


def take_down(client: DaemonClient, name: str) -> list[str]:
    """Take the environment down; if its launch was refused, there is none of that name."""
    with contextlib.suppress(NotFound):
        run(client, "down", {"name": name})
    return ["nothing of it is left"]


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn signals that end a command into exceptions, so that the environment is taken down.

    Ignored signals stay ignored: `nohup` lets this command survive a logout.
    """
    both = (signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in both if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


_OF_LAUNCH = ("env", "with_packages", "memory_mb", "gpus", "isolate")
_RARE = ("serve_as_is", "ready_timeout_seconds")  # as `openenv launch` has them
_MARKS = {"passed": good("✓"), "failed": bad("✗"), "warned": "!", "skipped": faint("-")}


@click.command()
@click.argument("source", shell_complete=completion.sources)
@click.option(
    "--action", "actions", multiple=True, metavar="JSON",
    help="An action to play; by default the examples in its schema, or random ones. Repeatable.",
)  # fmt: skip
@declared_options(EnvironmentTestOptions)
@declared_options(LaunchOptions, _OF_LAUNCH)
@set_option(LaunchOptions, only=_RARE)
@click.option("--keep", is_flag=True, help="Leave the environment running, to look at its log.")
@json_option
def test(source: str, actions: tuple[str, ...], keep: bool, output: Output, **options: Any) -> int:
    """Find the faults of an environment on a real server: a folder, module:Class, or a bundled one.

    Plays episodes like a training run, and checks: OpenEnv's protocol; memory per session; steps
    that block the event loop; equal episodes under the same seed; what 1,000 sessions leave behind
    (memory, descriptors, threads, tasks, processes). Each finding says what it means and how to fix
    it. The exit code is 1 if a check fails.

    Examples:
      # protocol, leaks, blocking steps, seeds
      openenv test ./my_env
      # with an action of its own
      openenv test ./my_env --action '{"code": "1 + 1"}'
      # look longer for leaks
      openenv test ./my_env --sessions 10000 --skip determinism
    """
    chosen = [action for text in actions if (action := read_action(text)) is not None]
    here = working_folder()
    found = read_source(source, here)
    name = f"test-{secrets.token_hex(3)}"
    launch = {
        "source": found.text,
        "cwd": str(here),
        "name": name,
        **given_options(LaunchOptions, options, only=(*_OF_LAUNCH, *_RARE)),
    }
    if not launch.get("serve_as_is"):
        launch["shards"] = 1
    payload = {"name": name, "actions": chosen, **given_options(EnvironmentTestOptions, options)}
    client = connect(output, before_start=lambda: check_source(launch))
    with ended_by_signals():
        try:
            return _test(client, launch, payload, output)
        finally:
            if keep:
                output.note(f"{name} is left running: openenv logs {name}; openenv down {name}")
            else:
                take_down(client, name)


def _test(client: DaemonClient, launch: Json, payload: Json, output: Output) -> int:
    for operation, of_it in (("launch", launch), ("test", payload)):
        final = _run(client, operation, of_it, output)
        if final["state"] != RequestState.SUCCEEDED:
            output.json({"passed": False, "error": final.get("error"), "checks": []})
            return exit_codes.of_request(final)
    report = final["result"]
    output.answer({**report, "source": launch["source"]}, *_report_lines(report))
    return exit_codes.OK if report["passed"] else exit_codes.FAILED


def _run(client: DaemonClient, operation: str, payload: Json, output: Output) -> Json:
    """Queue a request and follow it; the end of the command cancels it."""
    request = submit(client, operation, payload, {})
    lines: list[str] = []  # of the log, which the report replaces

    def is_shown_later(line: str) -> bool:
        is_late = operation == "test" and (sys.stdout.isatty() or line.startswith("  "))
        lines.extend([line] if is_late else [])  # else each check as it ends
        return is_late

    try:
        return follow_request(client, request, output, is_shown_later=is_shown_later)
    except KeyboardInterrupt:
        output.result(*map(plain, lines))
        client.cancel(request["id"])
        raise


def _report_lines(report: Json) -> list[str]:
    width = max(len(each["check"]) for each in report["checks"])
    lines = []
    for each in report["checks"]:
        mark, took = _MARKS[each["outcome"]], faint(f"({each['seconds']:.1f} s)")
        lines.append(f"{mark} {each['check']:{width}}  {plain(each['summary'])} {took}")
        for finding in each["findings"]:
            lines += [
                f"    {plain(finding['found'])}",
                faint(f"    means: {plain(finding['means'])}"),
                faint(f"    fix:   {plain(finding['remedy'])}"),
            ]
    outcomes = [each["outcome"] for each in report["checks"]]
    failed, run = outcomes.count("failed"), len(outcomes) - outcomes.count("skipped")
    if failed:
        return [*lines, "", bad(f"{failed} of {plural(run, 'check')} failed")]
    return [*lines, "", good("passed")]
