# SPDX-License-Identifier: Apache-2.0
"""`openenv`: the command group, and the one place where errors become exit codes.

A command's module is imported when it is called, so that `status` imports only its own. The help
page is written from the table below, without importing any module.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from inspect import cleandoc
from typing import TYPE_CHECKING, NoReturn, TextIO

import click

from .. import __version__
from ..client.errors import ClientError, RequestFailed
from ..system.text.units import near_matches
from . import exit_codes, passthrough

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# name: (module, what it does)
COMMANDS = {
    "up": ("commands.up", "Start the daemon, and print the limits found."),
    "launch": ("commands.launch", "Run an environment."),
    "rollout": ("commands.rollout", "Run many episodes of a policy."),
    "play": ("commands.play", "Reset and step an environment by hand, at a prompt."),
    "status": ("commands.status", "Show environments and requests, or one of them."),
    "dashboard": ("commands.addresses", "Open the dashboard in a browser."),
    "address": ("commands.addresses", "Print what clients of an environment connect to."),
    "gateway": ("commands.addresses", "Show the gateway, its address and its replicas."),
    "logs": ("commands.requests", "Print the log of an environment or a request."),
    "requests": ("commands.requests", "Show the queue and its history."),
    "wait": ("commands.requests", "Wait for requests; the outcome is the exit code."),
    "retry": ("commands.requests", "Submit an ended request again, with other memory if need be."),
    "cancel": ("commands.requests", "Cancel requests at once."),
    "bench": ("commands.bench", "Measure how many sessions an environment holds."),
    "test": ("commands.check", "Find an environment's faults on a real server."),
    "image": ("commands.launch", "Build container images of environments."),
    "scale": ("commands.replicas", "Change how many replicas an environment has."),
    "restart": ("commands.replicas", "Replace an environment's replicas; no session ends."),
    "down": ("commands.replicas", "Take environments down."),
    "prune": ("commands.replicas", "Remove virtual environments and images that nothing uses."),
    "stop": ("commands.up", "Stop the daemon; environments continue."),
    "check": ("commands.check", "Check this machine, or try a provider for real."),
    "info": ("commands.up", "Show the daemon's limits, plan, workers and settings."),
    "config": ("commands.up", "List every setting, and where it comes from."),
    "completion": ("completion", "Print the script that lets a shell complete."),
}
# Our commands, by the words that other tools use for them.
OTHER_WORDS = {
    **dict.fromkeys(("run", "serve", "start"), "launch SOURCE"),
    **dict.fromkeys(("ls", "list", "ps"), "status"),
    **dict.fromkeys(("top", "stats", "watch"), "status --watch"),
    **dict.fromkeys(("delete", "kill", "remove", "rm"), "down NAME"),
    **dict.fromkeys(("jobs", "queue"), "requests"),
    "version": "--version",
}
# The name that the user typed, because upstream's package has a command `openenv`, too.
NAME = "openenvd" if os.path.basename(sys.argv[0]) == "openenvd" else "openenv"  # noqa: PTH119
# Errors of writes to stdout and stderr; EBADF: it was opened only for reading.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class CommandGroup(click.Group):
    """Commands by name, imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command's module, and return the command."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f".{COMMANDS[cmd_name][0]}", __package__)
        command: click.Command = getattr(module, cmd_name)
        end_with_examples(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command, without importing any."""
        from click.shell_completion import CompletionItem

        known = {name: text for name, (_, text) in COMMANDS.items()}
        if passthrough.is_installed():
            known |= dict.fromkeys(passthrough.COMMANDS, "upstream's")
        begun = [name for name in known if name.startswith(incomplete)]
        return [
            *(CompletionItem(name, help=known[name]) for name in begun),
            *click.Command.shell_complete(self, ctx, incomplete),
        ]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or refuse an unknown name with a suggestion."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise click.UsageError(_unknown(args[0]), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help page's list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])
        if passthrough.is_installed():
            with formatter.section("Upstream's commands"):
                formatter.write_text(", ".join(passthrough.COMMANDS))


def end_with_examples(command: click.Command) -> None:
    r"""Move the examples of a docstring behind the options; `\b` keeps click from wrapping them."""
    text, heading, lines = (
        cleandoc(command.help or "").replace("openenv ", f"{NAME} ").partition("\n\nExamples:\n")
    )
    if heading:
        command.help, command.epilog = text, f"\b\nExamples:\n{lines}"
    if isinstance(command, click.Group):
        for below in command.commands.values():
            end_with_examples(below)


def example_lines(command: click.Command) -> list[str]:
    """Return the command lines of a command's examples, without their comments."""
    lines = (command.epilog or "").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.startswith(f"  {NAME} ")]


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="openenvd")
def cli() -> None:
    """Run OpenEnv environments on this machine, without running it out of memory.

    Examples:
      openenv launch echo                  # start the daemon, and an environment
      openenv status                       # show what runs
      openenv rollout echo --out episodes  # play episodes in it
      openenv down echo                    # take it down

    Exit codes: 0 ok, 1 request failed, 2 usage, 3 daemon not reachable, 4 not found, 124 timed out,
    130 interrupted, 137 out of memory, 141 stdout was closed early.
    """


end_with_examples(cli)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the installed command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, exit codes are lost
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a `✓` gets a `?`
            stream.reconfigure(errors="replace")
    try:
        code = run(given)
        sys.stdout.flush()
    except BrokenPipeError:
        code = exit_codes.BROKEN_PIPE
        _discard(sys.stdout)
    except OSError as exc:
        if exc.errno not in _CANNOT_WRITE:
            raise
        _give_up_output(exc)
        code = exit_codes.FAILED
    sys.exit(code)


def _give_up_output(exc: OSError) -> None:
    """Discard output that cannot be written, and say so on stderr if that works."""
    _discard(sys.stdout)
    try:
        sys.stderr.write(f"error: the output cannot be written: {exc.strerror}\n")
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Discard the rest of a stream's buffer, so that Python exits without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; `BrokenPipeError` if stdout was closed."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if arguments and arguments[0] in passthrough.COMMANDS:
        return passthrough.run(arguments)
    try:
        return _invoke(arguments)
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except (KeyboardInterrupt, click.Abort):
        sys.stderr.write("\n")
        return exit_codes.INTERRUPTED
    except (click.ClickException, ClientError) as exc:
        try:
            _report(exc, as_json="--json" in arguments)
        except OSError as unwritten:
            if unwritten.errno not in _CANNOT_WRITE:
                raise
            _give_up_output(unwritten)  # the exit code still tells
        return exit_codes.of_error(exc) if isinstance(exc, ClientError) else exit_codes.USAGE


def _invoke(arguments: list[str]) -> int:
    if "OPENENV_HOME" in os.environ:
        from ..schema.settings import Paths

        try:
            Paths.from_environment()
        except ValueError as exc:
            raise click.UsageError(str(exc)) from None
    for word in arguments:
        try:
            word.encode()  # names, paths and values travel as JSON, which is Unicode
        except UnicodeEncodeError:
            raise click.UsageError(f"{os.fsencode(word)!r} is not UTF-8 text") from None
    if any(name.endswith("_COMPLETE") and name.startswith("_OPENENV") for name in os.environ):
        cli.main(args=arguments)  # a shell asks for completions
    # Not `cli.main`, which would turn a broken pipe into a plain failure.
    with cli.make_context(NAME, arguments) as context:
        code = cli.invoke(context)
        return code if isinstance(code, int) else exit_codes.OK


def _report(error: click.ClickException | ClientError, *, as_json: bool) -> None:
    from .output.failures import error_lines, request_failure
    from .output.output import Output

    output = Output(as_json=as_json)
    if isinstance(error, click.ClickException):
        lead = _lead(error)
        error.show()
        if lead:
            sys.stderr.write(f"{lead[0].upper()}{lead[1:]}\n")
        details = {"kind": "usage", "message": error.format_message(), "hint": lead or "see --help"}
        output.json({"error": details})
    elif isinstance(error, RequestFailed):
        output.note(*request_failure(error.request))
        output.json({"error": error.request["error"]})
    else:
        output.note(*(x.replace("openenv ", f"{NAME} ") for x in error_lines(error)))
        output.json(error.to_json())


def _lead(error: click.ClickException) -> str | None:
    """Return a suggestion: an example if an argument is missing, or the command that was meant."""
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return None
    if isinstance(error, click.MissingParameter):
        examples = example_lines(error.ctx.command)
        return f"for example: {examples[0]}" if examples else None
    if isinstance(error, click.NoSuchOption):
        from difflib import get_close_matches

        from .help_pages import set_option_of

        near = get_close_matches(error.option_name, error.possibilities or (), cutoff=0.85)
        error.possibilities = near  # type: ignore[misc]  # click's own are far from it
        of_it = set_option_of(error.ctx.command)
        if of_it is not None and (meant := of_it.instead_of(error.option_name)):
            error.possibilities = None  # type: ignore[misc]  # click would add names like it
            return f"write {meant}"
    return None


def _unknown(name: str) -> str:
    if meant := OTHER_WORDS.get(name):
        return f"no command is called {name!r}; use {NAME} {meant}"
    upstream = passthrough.COMMANDS if passthrough.is_installed() else ()
    _, hint = near_matches(name, [*COMMANDS, *upstream], f"{NAME} --help lists them")
    return f"no command is called {name!r}; {hint}"


if __name__ == "__main__":
    main()
