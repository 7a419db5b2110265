# SPDX-License-Identifier: Apache-2.0
"""What is launched, made ready on the login node of a cluster that ssh leads to: both ends.

    launch ──what, and a digest of its files──▶ python -m …prepared_there, on the login node
           ◀──────────── "wants files" ────────
           ──────────── its files, as tar ────▶  slurm/sources/HOME/DIGEST/NAME
           ◀──────── what it says, line by line  the project's virtual environment, as for a launch
           ◀──────────── the program ──────────  that is made there

The files of one version are copied once, and jobs run in that folder until it is removed
(`engines/slurm_copies.py`). A copy that fails is
removed; one that is killed leaves a folder with another name, which the next one does not use. A
connection that breaks fails the launch, which says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ...env_host.protocol import HostConfig
from ...system.json_lines import Json, decode_line, encode_line
from ..engines.base import EngineGone
from ..engines.remote_engine import await_hello, hello, own_output
from ..engines.slurm_login import copies, home_there
from ..engines.slurm_ssh import LoginNode
from ..errors import EngineFailed, EnvironmentsError, PreparationFailed
from ..layout import Layout, make_private
from ..sources.content import files_below, module_files
from ..sources.program import HOST_PROGRAM, Program, program_of
from ..sources.resolve import Bundled, ClassSource, Project, ResolvedSource, resolve
from ..spec import EnvironmentSpec
from ..venv.overlay import overlay_python
from ..venv.project_venv import project_python
from .environment_variables import child_environment

Say = Callable[[str], None]


# Here


def prepare_there(
    node: LoginNode, spec: EnvironmentSpec, source: ResolvedSource, say: Say
) -> Program:
    """Return the program that jobs run, with the paths that it has there. Blocks.

    Args:
        node: The login node.
        spec: The environment.
        source: What is launched, found here.
        say: Gets lines about what happens there.

    Raises:
        EngineFailed: It cannot be reached.
        PreparationFailed: What is launched cannot be made ready there.
    """
    try:
        return _prepared(node, spec, source, say)
    except EngineGone as exc:
        raise EngineFailed(exc.message, exc.hint) from exc


def _prepared(node: LoginNode, spec: EnvironmentSpec, source: ResolvedSource, say: Say) -> Program:
    with tempfile.TemporaryFile() as archive, tempfile.TemporaryFile() as told:
        digest, count = pack(source, archive)
        process = subprocess.Popen(
            node.command(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=told,
        )

        def failure() -> EngineGone:
            return node.failure(process.wait(), told)

        try:
            await_hello(process, node.host, failure)
            what = what_is(source) | {"spec": asdict(spec), "digest": digest, "files": count}
            what["home"] = node.home_label
            found = _converse(process, what, archive, say)
            if found is None:
                raise failure()
            return found
        finally:
            process.kill()
            with contextlib.suppress(OSError), process:  # closes its pipes
                pass


def what_is(source: ResolvedSource) -> Json:
    """Return how what is launched is found among its files.

    Raises:
        PreparationFailed: Slurm runs no such thing.
    """
    match source:
        case Bundled(name=name):
            return {"source": name, "folder": None}
        case ClassSource(reference=reference, folder=folder):
            return {"source": reference, "folder": folder.name}
        case Project(folder=folder):
            return {"source": ".", "folder": folder.name}
        case _:
            raise PreparationFailed(f"{source.sentence}: Slurm runs none", "--provider docker")


def _converse(
    process: subprocess.Popen[bytes], what: Json, archive: IO[bytes], say: Say
) -> Program | None:
    """Return the program; None: the connection has ended before."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(encode_line(what))
        process.stdin.flush()
        for line in process.stdout:
            message = decode_line(line)
            if message.get("wants_files"):
                # One that has no room for them ends: what it says of that is still to be read.
                with contextlib.suppress(BrokenPipeError):
                    shutil.copyfileobj(archive, process.stdin)
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            elif "say" in message:
                say(message["say"])
            elif error := message.get("error"):
                raise PreparationFailed(error["message"], error["hint"])
            elif program := message.get("program"):
                return _read_program(program)
    return None


def _read_program(data: Json) -> Program:
    return Program(
        Path(data["python"]),
        Path(data["folder"]),
        HostConfig.from_json(data["config"]),
        {name: Path(target) for name, target in data["links"].items()},
        host_program=Path(data["host_program"]),
        variables=data["variables"],
    )


def pack(source: ResolvedSource, archive: IO[bytes]) -> tuple[str | None, int]:
    """Write the files of a source as tar; their digest and number, None: it has none of its own."""
    if isinstance(source, Project):
        files = dict(files_below(source.folder))
    elif isinstance(source, ClassSource):
        files = dict(module_files(source))
    else:
        return None, 0
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, path in sorted(files.items()):
            tar.add(path, name, recursive=False, filter=_without_owner)
        count = len(tar.getmembers())
    archive.seek(0)
    digest = hashlib.file_digest(archive, "sha256").hexdigest()[:20]  # type: ignore[arg-type]  # a file
    archive.seek(0)
    return digest, count


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out what is no part of a version."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


# There


def prepare_here(what: Json, files: IO[bytes], send: Callable[[Json], None]) -> Program:
    """Return the program of what a launch elsewhere has sent.

    Raises:
        EnvironmentsError
    """
    layout = Layout(make_private(home_there()))
    folder = layout.home
    if what["folder"] is not None:
        folder = copies(layout.home, what["home"]) / str(what["digest"]) / what["folder"]
        if not folder.is_dir():
            send({"wants_files": True})
            _unpack(files, folder, what["files"])
    spec = EnvironmentSpec(**what["spec"])
    source = resolve(what["source"], folder)

    def say(text: str) -> None:
        send({"say": text})

    python = project_python(source, layout, say) if isinstance(source, Project) else None
    if spec.with_packages:
        python = overlay_python(python, spec.with_packages, layout, folder, say)
    return program_of(spec, source, python)


def _unpack(files: IO[bytes], folder: Path, count: int) -> None:
    make_private(folder.parent)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with tarfile.open(fileobj=files, mode="r|") as tar:
            tar.extractall(made, filter="tar")
            if len(tar.getmembers()) != count:  # a whole number of blocks: tarfile sees no fault
                raise OSError("the connection broke while files were copied")
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # no other launch was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def variables_here(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a replica on this machine; `given` by the user."""
    home = str(home_there())
    return child_environment(os.environ, home=home, max_sessions=None, given=given)


def _to_json(program: Program, spec: EnvironmentSpec) -> dict[str, Any]:
    return {
        "python": str(program.python),
        "folder": str(program.folder),
        "config": program.config.to_json(),
        "links": {name: str(target) for name, target in program.links.items()},
        "host_program": str(HOST_PROGRAM),
        "variables": variables_here(spec.env),
    }


def main() -> None:
    """Be the other end."""
    os.umask(0o077)
    output = own_output()

    def send(message: Json) -> None:
        output.write(encode_line(message))
        output.flush()

    send(hello())
    what = decode_line(sys.stdin.buffer.readline())
    try:
        program = prepare_here(what, sys.stdin.buffer, send)
        send({"program": _to_json(program, EnvironmentSpec(**what["spec"]))})
    except (EnvironmentsError, OSError) as exc:
        message = exc.message if isinstance(exc, EnvironmentsError) else str(exc)
        send({"error": {"message": message, "hint": getattr(exc, "hint", None)}})


if __name__ == "__main__":
    main()
