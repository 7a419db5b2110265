# SPDX-License-Identifier: Apache-2.0
"""Git repositories as sources, each pinned to a commit.

    git+https://HOST/PATH[@REF][#subdirectory=FOLDER]
    hf://ORG/NAME[@REF]            a Space of Hugging Face: https://huggingface.co/spaces/ORG/NAME

REF is a branch, a tag, or the 40 characters of a commit; without it, the repository's HEAD.

    daemon, at submission   `pin` asks the repository for the commit of REF, and writes it into the
                            source: the request, its generation and a retry name one commit
    worker                  `preparation/checkout.py` fetches that commit, unless it is here

Failure cases

    the repository cannot be read   the submission is refused; the hint names a commit that is here
    REF is a whole commit           nothing is asked, so what was fetched before works offline
    there is no such REF            the submission is refused
    the host is this machine        refused: a source must not reach services behind loopback, of
                                    this machine's other addresses, or of a cloud's metadata
    the repository redirects        refused, since the redirection could lead to such a service
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import getproxies

from ...schema.errors import UnknownSource
from ...schema.spec import REPOSITORY_SCHEMES

SPACES = "https://huggingface.co/spaces/"
HEAD = "HEAD"
ANSWER_SECONDS = 15.0  # for the repository's list of references
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REF = re.compile(r"\w[\w./+-]*")
_FORMS = "write git+https://HOST/PATH@REF#subdirectory=FOLDER, or hf://ORG/NAME@REF"
# Git never prompts. It follows the user's own `url.….insteadOf`; helpers of other URLs never run.
_ENVIRON = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:ssh:git"}
_ENVIRON |= {"GIT_LFS_SKIP_SMUDGE": "1"}  # git-lfs would ask any server that the repository names
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_METADATA = ("fd00:ec2::254", "100.100.100.200", "168.63.129.16")  # of AWS, Alibaba and Azure
_OF_ANOTHER_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


@dataclass(frozen=True, slots=True)
class Repository:
    """A folder of a repository at a reference; `text` is the source without its reference."""

    scheme: str
    text: str
    url: str
    ref: str
    subdirectory: str

    @property
    def source(self) -> str:
        """Return the source as a user writes it, with its reference."""
        folder = f"#subdirectory={self.subdirectory}" if self.subdirectory else ""
        return f"{self.text}@{self.ref}{folder}"


def is_repository(source: str) -> bool:
    """Return whether a source names a repository."""
    return source.startswith(REPOSITORY_SCHEMES)


def parse_repository(source: str) -> Repository:
    """Read a source that names a repository; raises `UnknownSource` if it is malformed."""
    scheme = next(each for each in REPOSITORY_SCHEMES if source.startswith(each))
    url = SPACES + source.removeprefix(scheme) if scheme == "hf://" else source.removeprefix("git+")
    text = source.partition("#")[0]
    try:
        parts = urlsplit(url)
        _ = parts.port  # a wrong one is an error
    except ValueError as exc:
        raise UnknownSource(f"{source!r} is not an address: {exc}", _FORMS) from exc
    path, _, ref = parts.path.partition("@")
    path, text = path.rstrip("/"), text.removesuffix("/")
    if "@" in parts.netloc:
        why = "passwords in sources would be stored, and shown by `openenv status`"
        raise UnknownSource(f"the source has a password: {why}", "give it to git: git credential")
    folder = PurePosixPath(*parse_qs(parts.fragment).get("subdirectory", ()))
    is_folder = not parts.fragment or (folder.parts and ".." not in folder.parts)
    names = path.removeprefix("/spaces").strip("/").split("/")
    is_complete = all(name.strip(".") for name in names) and (scheme != "hf://" or len(names) == 2)
    is_clean = not parts.query and text.isprintable() and str(folder).isprintable()
    if not (parts.hostname and is_complete and is_folder and is_clean) or folder.is_absolute():
        raise UnknownSource(f"{source!r} is not the address of a repository", _FORMS)
    if "@" in parts.path and not _REF.fullmatch(ref):
        raise UnknownSource(f"{source!r}: {ref!r} cannot be a branch, tag or commit", _FORMS)
    text = text.removesuffix(f"@{ref}")
    address = f"https://{parts.netloc}{path}"
    return Repository(scheme, text, address, ref or HEAD, str(folder) if parts.fragment else "")


def pin(source: str, fetched: Mapping[str, str]) -> str:
    """Return the source with the commit that its reference names now. Blocks.

    `fetched` are commits that are here, by the addresses of their repositories. Raises
    `UnknownSource` if it is malformed, cannot be read, or has no such reference.
    """
    repository = parse_repository(source)
    if _COMMIT.fullmatch(repository.ref):  # which never changes
        return source
    asked = [repository.ref, f"refs/tags/{repository.ref}^{{}}"]
    try:
        listed = _run(["ls-remote", "--quiet", repository.url, *asked], repository.url)
    except OSError as exc:
        hint = "it may need a password, or the network"
        if isinstance(exc, FileNotFoundError):
            hint = "install git, then openenv stop: the next daemon finds it"
        if (commit := fetched.get(repository.url)) is not None:
            hint += f"; fetched before: {replace(repository, ref=commit).source}"
        raise UnknownSource(f"{repository.url} cannot be read: {exc}", hint) from exc
    found = {name: commit for commit, name in (line.split("\t") for line in listed)}
    ref = repository.ref
    for name in (f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", f"refs/heads/{ref}", ref):
        if name in found:
            return replace(repository, ref=found[name]).source
    raise UnknownSource(
        f"{repository.url} has no branch or tag {ref!r}",
        f"git ls-remote {repository.url} lists them; a commit needs all its 40 characters",
    )


def git_command(url: str) -> tuple[list[str], dict[str, str]]:
    """Return the beginning of git's command line, and its environment, to use a repository.

    The repository's address is looked up once, and git connects to that address alone. Raises
    `OSError` if that is one of this machine or its link, or is not found; `FileNotFoundError` if
    there is no git.
    """
    if shutil.which("git") is None:
        raise FileNotFoundError("git is not installed")
    parts = urlsplit(url)
    host, port = str(parts.hostname), parts.port or 443
    options = ["-c", "http.followRedirects=false", "-c", "core.hooksPath=/dev/null"]
    inherited = {k: v for k, v in os.environ.items() if k not in _OF_ANOTHER_REPOSITORY}
    asked = ["git", "ls-remote", "--get-url", url]  # as the user's `insteadOf` says; asks no server
    found = subprocess.run(asked, env=inherited, capture_output=True, text=True, check=False)
    if found.stdout.strip() != url or "https" in getproxies():
        return ["git", *options], inherited | _ENVIRON
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise OSError(f"the host {host} is not found") from exc
    addresses = {str(each[4][0]) for each in infos}
    if own := next(filter(_is_own, addresses), None):
        raise OSError(f"{host} is {own}, an address of this machine or its link")
    if host not in addresses:
        options += ["-c", f"http.curloptResolve={host}:{port}:{','.join(sorted(addresses))}"]
    return ["git", *options], inherited | _ENVIRON


def _is_own(address: str) -> bool:
    """Return whether an address is one of this machine, or is valid on its link alone."""
    parsed: Any = ipaddress.ip_address(address.partition("%")[0])
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    if parsed in _NAT64:
        parsed = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
    if parsed.is_link_local or parsed.is_multicast or str(parsed) in _METADATA:
        return True
    family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(parsed), 0))  # possible at the machine's own addresses alone
        except OSError:
            return False
    return True


def _run(arguments: list[str], url: str) -> list[str]:
    """Run git, and return the lines that it prints; raises `OSError` with its first words."""
    command, environ = git_command(url)
    git = subprocess.Popen(
        [*command, *arguments], env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    with git:
        try:
            out, err = git.communicate(timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(git.pid, signal.SIGKILL)  # with the program that it has started for https
            raise OSError(f"no answer within {ANSWER_SECONDS:g} s") from None
    if git.returncode:
        lines = err.strip().splitlines() or [f"git exited with code {git.returncode}"]
        raise OSError(lines[0].removeprefix("fatal: "))
    return out.splitlines()
