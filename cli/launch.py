# SPDX-License-Identifier: Apache-2.0
"""`openenv launch`: queue a launch, follow it until the environment is ready, say how to use it."""

from __future__ import annotations

import os
from typing import Any

import click

from .options import connect, count_or_auto, json_option, megabytes
from .output import Output, good
from .queued import follow, leave
from .source import check_name, read_source, read_variables, working_folder


@click.command()
@click.argument("source")
@click.option("--name", metavar="NAME", help="What to call it; by default as its source is called.")
@click.option("--async", "is_async", is_flag=True, help="Print the request's id, and return.")
@click.option("--replicas", type=click.IntRange(min=1), help="Env servers behind one address.")
@click.option("--max-sessions", type=click.IntRange(min=1), help="Most sessions at once.")
@click.option(
    "-e", "--env", "variables", multiple=True, metavar="KEY[=VALUE]",
    help="A variable for the environment; without a value, the one it has here. Repeatable.",
)  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65535), help="Its port; by default a free one.")
@click.option(
    "--memory", type=megabytes, metavar="SIZE",
    help="Most memory of the launch, and of each replica: 512M, 2G.",
)  # fmt: skip
@click.option(
    "--shards", type=count_or_auto, metavar="N|auto",
    help="Processes that serve each replica's sessions; `auto`, the default: one per core.",
)  # fmt: skip
@click.option(
    "--isolate/--no-isolate", "isolate", default=None,
    help="A process for each session; by default where the class needs it.",
)  # fmt: skip
@click.option(
    "--session-memory", type=megabytes, metavar="SIZE",
    help="Most memory of one isolated session: 64M.",
)  # fmt: skip
@click.option(
    "--admission-timeout", type=click.FloatRange(min=0), metavar="SECONDS",
    help="How long a client waits for a session when all are taken; by default 5.",
)  # fmt: skip
@click.option(
    "--gpus", type=click.IntRange(min=0), metavar="N",
    help="GPUs of each replica; its shards take them in turn.",
)  # fmt: skip
@click.option("--provider", metavar="NAME", help="What runs its replicas; by default `local`.")
@click.option(
    "--ready-timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Give up when it is not ready by then.",
)  # fmt: skip
@click.option(
    "--step-timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Longest a single step may take.",
)  # fmt: skip
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Longest the whole request may run, once it runs.",
)  # fmt: skip
@click.option("--retry-oom", is_flag=True, help="Killed for memory, run again with what it needed.")
@click.option("--priority", type=click.IntRange(-100, 100), help="Higher runs earlier.")
@click.option("--idempotency-key", metavar="KEY", help="The same key again is the same request.")
@click.option("--serve-as-is", is_flag=True, help="Run the project's own app, untouched.")
@json_option
def launch(source: str, as_json: bool, is_async: bool, **options: Any) -> int:
    """Run an environment: a bundled name, a folder with openenv.yaml, or module:Class.

    Waits until it is ready, and prints its address. Ctrl-C detaches, a second one cancels.
    """
    output = Output(as_json=as_json)
    payload, note = _payload(source, options)
    if note is not None:
        output.note(note)
    client = connect(output)
    request = client.submit(
        "launch",
        payload,
        idempotency_key=options["idempotency_key"],
        priority=options["priority"],
        timeout_seconds=options["timeout"],
        retry_oom=options["retry_oom"] or None,
    )
    if is_async:
        return leave(request, output)
    ready = f"{request['environment']} is ready at "  # what we end with ourselves
    return follow(
        client, request, output, _conclude, is_told_later=lambda line: line.startswith(ready)
    )


def _payload(text: str, options: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """What the operation is given, and a note for the user. Only what was said is sent."""
    here = working_folder()
    source = read_source(text, here)
    name = source.name if options["name"] is None else check_name(options["name"])
    said = {
        "replicas": options["replicas"],
        "max_sessions": options["max_sessions"],
        "env": read_variables(options["variables"], os.environ) or None,
        "port": options["port"],
        "memory_mb": options["memory"],
        "shards": options["shards"] or None,
        "isolate": options["isolate"],
        "session_memory_mb": options["session_memory"],
        "admission_timeout_seconds": options["admission_timeout"],
        "gpus": options["gpus"],
        "provider": options["provider"],
        "ready_timeout_seconds": options["ready_timeout"],
        "step_timeout_seconds": options["step_timeout"],
        "serve_as_is": options["serve_as_is"] or None,
    }
    given = {key: value for key, value in said.items() if value is not None}
    return {"name": name, "source": source.text, "cwd": str(here), **given}, source.note


def _conclude(final: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    environment = _environment_of(final)
    is_there = environment["address"] is not None
    return {"environment": environment}, _how_to_use(environment) if is_there else []


def _environment_of(request: dict[str, Any]) -> dict[str, Any]:
    """The environment as the launch left it: name, state, address and, when ready, replicas."""
    found = (request.get("result") or {}).get("environment")
    if found is not None:
        return {"name": found["name"], "state": found["state"], "address": found["address"]}
    return {"name": request["environment"], "state": request["state"], "address": None}


def _how_to_use(environment: dict[str, Any]) -> list[str]:
    return [
        f"{good('✓')} {environment['name']} is ready at {environment['address']}",
        "",
        "  from openenv import GenericEnvClient",
        f'  with GenericEnvClient(base_url="{environment["address"]}").sync() as env:',
        "      print(env.reset().observation)",
    ]
