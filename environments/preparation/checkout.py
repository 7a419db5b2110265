# SPDX-License-Identifier: Apache-2.0
"""Fetches the commit of a repository that a launch names, once, into a folder of its own.

    venvs/git-<key>/files/<name>    the files of one commit; `complete` is written last

It is made, used and removed as virtual environments are (`project_venv.py`, `venv_cleanup.py`).

    git fails, or the network       `PreparationFailed` with git's last lines; nothing is left
    a link leads out of the folder  refused: a server of the project could show private files
    submodules, hooks               are not fetched; are not run
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ...schema.errors import PreparationFailed, UnknownSource
from ...schema.layout import Layout
from ..sources.manifest import MANIFEST_NAME
from ..sources.repository import Repository, git_command, parse_repository
from ..sources.resolve import ResolvedSource, resolve
from .project_venv import CHECKOUT, make_once, noted_of
from .uv import Say, run_command

_KEY_LENGTH = 16
_FILES = "files"  # the folder that has the repository's own
_HINT = "is the commit there, and the network? git ls-remote lists what the repository has"
_MAX_FOLDERS = 5  # named in a hint
_LAST_LINES = 5  # of git's output, in a failure


def checkout(source: str, layout: Layout, say: Say) -> Path:
    """Return the folder of a pinned source, whose commit is fetched if it is not here. Blocks.

    Raises `PreparationFailed`: no commit, no such folder, or a link that leads out.
    """
    repository = parse_repository(source)
    url, commit = repository.url, repository.ref
    key = hashlib.sha256(f"{url}@{commit}".encode()).hexdigest()[:_KEY_LENGTH]
    place = layout.venvs / f"{CHECKOUT}{key}"
    files = place / _FILES / (url.rpartition("/")[2].removesuffix(".git") or "repository")

    def build() -> None:
        git = place / ".git"
        files.mkdir(parents=True, mode=0o700)
        stored = [f"--git-dir={git}", f"--work-tree={files}"]
        steps = (
            ["init", "--quiet", "--bare", str(git)],
            [*stored, "fetch", "--quiet", "--depth=1", url, commit],
            [*stored, "checkout", "--quiet", "--force", commit],
        )
        _git(url, steps, place, say)
        shutil.rmtree(git)
        if (link := next(_leading_out(files), None)) is not None:
            text = f"{url} has a link that leads out of it: {link.relative_to(files)}"
            raise PreparationFailed(text, "replace the link by a file, and launch the new commit")
        attributes = files / ".gitattributes"
        if attributes.is_file() and "filter=lfs" in attributes.read_text(errors="replace"):
            say("note: files in Git LFS are not fetched: what is there are their pointers")

    note = {"project": f"{url}@{commit}", "url": url, "commit": commit}
    make_once(place, note, build, say, what=f"{url} at {commit[:12]}: fetched")
    folder = files / repository.subdirectory
    if not folder.is_dir():
        text = f"{url} at {commit[:12]} has no folder {repository.subdirectory}"
        root = replace(repository, subdirectory="")
        hint = _hint_of_folders(root, files) or "name another one: #subdirectory=FOLDER"
        raise PreparationFailed(text, hint)
    return folder


def resolve_in_checkout(source: str, folder: Path) -> ResolvedSource:
    """Return the environment in the folder of a pinned source; raises `ManifestError`.

    `UnknownSource`: there is none; the hint names folders below that have one.
    """
    try:
        return resolve(str(folder), folder)
    except UnknownSource as exc:
        hint = _hint_of_folders(parse_repository(source), folder) or exc.hint
        raise UnknownSource(exc.message.replace(str(folder), source), hint) from exc


def _hint_of_folders(repository: Repository, folder: Path) -> str | None:
    """Return the command for an environment below a folder; None if there is none."""
    inside = sorted(each.parent.relative_to(folder) for each in folder.rglob(MANIFEST_NAME))
    if not inside:
        return None
    below = PurePosixPath(repository.subdirectory)
    named = str(below / inside[0]) if len(inside) == 1 else "FOLDER"
    command = f"openenv launch {replace(repository, subdirectory=named).source}"
    if len(inside) == 1:
        return command
    many = f" and {more} more" if (more := len(inside) - _MAX_FOLDERS) > 0 else ""
    names = ", ".join(str(below / each) for each in inside[:_MAX_FOLDERS])
    return f"{command}, where FOLDER is one of {names}{many}"


def fetched_commits(layout: Layout) -> dict[str, str]:
    """Return a commit of each repository that is here, by the repository's address."""
    notes = [noted_of(place) for place in layout.venvs.glob(f"{CHECKOUT}*/")]
    notes.sort(key=lambda note: note.get("made_at", 0.0))
    return {note["url"]: note["commit"] for note in notes if "url" in note}


def _git(url: str, steps: Iterable[list[str]], folder: Path, say: Say) -> None:
    """Run commands of git one after another; the host is looked up once for all of them."""
    try:
        command, environ = git_command(url)
        for arguments in steps:
            argv = [*command, *arguments]
            code, lines = run_command(argv, folder=folder, environ=environ, on_line=say)
            if code:
                words = "\n".join([f"{url} cannot be fetched:", *lines[-_LAST_LINES:]])
                raise PreparationFailed(words, _HINT)
    except OSError as exc:
        raise PreparationFailed(f"{url} cannot be fetched: {exc}", _HINT) from exc


def _leading_out(folder: Path) -> Iterator[Path]:
    """Yield the links below a folder that lead out of it, or to themselves."""
    inside = folder.resolve()
    for path in filter(Path.is_symlink, folder.rglob("*")):
        try:
            is_inside = path.resolve().is_relative_to(inside)
        except (OSError, RuntimeError):
            is_inside = False
        if not is_inside:
            yield path
