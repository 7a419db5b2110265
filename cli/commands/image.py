# SPDX-License-Identifier: Apache-2.0
"""`openenv image build`: queue the building of an image, follow it, print the image's name."""

from __future__ import annotations

from typing import Any

import click

from ...client.sources import check_source, read_source, working_folder
from ...schema.operation_options import ImageOptions, RequestOptions
from .. import completion
from ..following import RARE, carry_out, submit_options
from ..option_groups import set_option
from ..options import connect, declared_options, given_options, json_option
from ..output.output import Output, good


@click.group()
def image() -> None:
    """Build container images of environments, for engines to start replicas from."""


@image.command()
@click.argument("source", shell_complete=completion.sources)
@declared_options(ImageOptions)
@set_option(RequestOptions, only=RARE)
@submit_options
@json_option
def build(source: str, output: Output, is_async: bool, **options: Any) -> int:
    """Build the image of an environment: a bundled name, a folder with openenv.yaml, module:Class.

    It has a Python, what the project needs, the project, and the server that local environments
    have. Built again only when one of its files has changed. Needs the `docker` command.
    """
    here = working_folder()
    found = read_source(source, here)
    if found.note is not None:
        output.note(found.note)
    given = given_options(ImageOptions, options)
    payload = {"source": found.text, "cwd": str(here), **given}
    client = connect(output, before_start=lambda: check_source(payload))
    return carry_out(
        client, "build_image", payload, output, _conclude, is_async=is_async, options=options
    )


def _conclude(final: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    built = (final.get("result") or {}).get("image")
    if built is None:
        return {"image": None}, []
    return {"image": built}, [f"{good('✓')} {built}", "", f"  openenv launch docker://{built}"]
