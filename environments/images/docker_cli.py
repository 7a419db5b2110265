# SPDX-License-Identifier: Apache-2.0
"""`DockerCli`: runs the `docker` command, which builds images, and explains its failures.

Images are built by the command rather than by the library that starts containers: it alone knows
BuildKit, which Dockerfiles of upstream's projects need, and the user's context and credentials.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO

from ...system.terminal_text import plain
from ..command_output import run_command
from ..engines.docker_hints import INSTALL, hint_on
from ..errors import EngineFailed, PreparationFailed, with_last_lines
from ..image_names import digest_in_repository

LAST_LINES = 20  # of its output, in a failure
ASK_SECONDS = 20.0
_TEDIOUS = ("--->", "Removing intermediate", "+ ", "Downloaded ", "DEPRECATED:")

Say = Callable[[str], None]


class DockerCli:
    """Runs the command.

    Args:
        say: Gets its output, line by line.

    Raises:
        EngineFailed: It is not installed.
    """

    def __init__(self, say: Say) -> None:
        found = shutil.which("docker")
        if found is None:
            raise EngineFailed("the command docker is not installed", INSTALL)
        self._docker = found
        self._say = say

    def id_of(self, image: str) -> str | None:
        """Return the id of an image; None when the engine does not have it.

        Raises:
            EngineFailed: It cannot be asked.
        """
        return self._inspect(image, "{{.Id}}")

    def digest_of(self, image: str) -> str | None:
        """Return the name of an image that its registry has for good; None when it has none.

        Raises:
            EngineFailed: It cannot be asked.
        """
        found = self._inspect(image, "{{json .RepoDigests}}")
        return digest_in_repository(image, json.loads(found or "null") or ())

    def _inspect(self, image: str, wanted: str) -> str | None:
        asked = subprocess.run(
            [self._docker, "image", "inspect", "--format", wanted, image],
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=False,
        )
        if asked.returncode != 0 and "no such image" not in asked.stderr.lower():
            said = asked.stderr.strip() or f"docker exited with code {asked.returncode}"
            raise EngineFailed(f"Docker cannot be used: {said}", hint_on(said) or INSTALL)
        return asked.stdout.strip() if asked.returncode == 0 else None

    def build(
        self, tags: Iterable[str], *more: str, stdin: IO[bytes] | None, variables: Mapping[str, str]
    ) -> None:
        """Build an image.

        Args:
            tags: What it is to be called.
            more: Further arguments, and the context.
            stdin: The context, if it is read from there.
            variables: Build arguments; their values do not appear on the command line.

        Raises:
            PreparationFailed: It cannot be built; the message has the last lines.
        """
        named = [word for tag in tags for word in ("--tag", tag)]
        arguments = [word for name in sorted(variables) for word in ("--build-arg", name)]
        self._run("build", *named, *arguments, *more, stdin=stdin, variables=variables)

    def pull(self, image: str) -> None:
        """Get an image from its registry.

        Raises:
            PreparationFailed: It cannot be had; the message has the last lines.
        """
        self._run("pull", image)

    def _run(
        self,
        what: str,
        *arguments: str,
        stdin: IO[bytes] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        code, lines = run_command(
            [self._docker, what, *arguments],
            folder=Path("/"),
            environ={**os.environ, **(variables or {}), "BUILDKIT_PROGRESS": "plain"},
            on_line=self._relay,
            stdin=stdin,
        )
        if code != 0:
            told = [text for line in lines if (text := plain(line).rstrip())][-LAST_LINES:]
            text = f"docker {what} exited with code {code}; its last lines:"
            raise PreparationFailed(with_last_lines(text, told), hint_on("\n".join(told)))

    def _relay(self, line: str) -> None:
        text = plain(line).rstrip()
        if text and not text.lstrip().startswith(_TEDIOUS):
            self._say(f"  docker: {text}")
