# SPDX-License-Identifier: Apache-2.0
"""Names of images: `docker://IMAGE` as a source, and the tags of images that are built here."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..schema.errors import UnknownSource

SCHEME = "docker://"
REPOSITORY = "openenvd"  # of what is built here: openenvd/my-env:4f1d…
_DIGEST_LENGTH = 12
_DOCKERS_REGISTRY = "docker.io"
# distribution/reference: a registry with its port, a path, and a tag or a digest.
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REGISTRY = r"[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?"
_REFERENCE = re.compile(
    rf"(?:{_REGISTRY}/)?{_PART}(?:/{_PART})*(?::[\w][\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)


def image_of(source: str) -> str | None:
    """Return the image that a source names; None when it names none.

    Raises:
        UnknownSource: What follows `docker://` cannot be the name of an image.
    """
    if not source.startswith(SCHEME):
        return None
    return check_reference(source.removeprefix(SCHEME))


def check_reference(image: str) -> str:
    """Return the name of an image, when it can be one.

    Raises:
        UnknownSource: It cannot.
    """
    if _REFERENCE.fullmatch(image) is None:
        raise UnknownSource(
            f"{image!r} cannot be the name of an image",
            "write docker://NAME:TAG or docker://REGISTRY/NAME:TAG, in lower case",
        )
    return image


def digest_in_repository(image: str, digests: Iterable[str]) -> str | None:
    """Return the digest that an image has in the repository that its name is of; None: none.

    Args:
        image: As somebody calls it.
        digests: What all repositories call it that it was pulled from or pushed to: `NAME@sha256:…`
    """
    if "@" in image:
        return image
    own = _repository_of(image)
    return next((each for each in digests if _repository_of(each) == own), None)


def _repository_of(image: str) -> tuple[str, str]:
    """Return registry and path of an image's name, as Docker completes them."""
    name = image.partition("@")[0]
    first, slash, rest = name.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        first, rest = _DOCKERS_REGISTRY, name
    path = rest.partition(":")[0]  # without the tag
    if first in (_DOCKERS_REGISTRY, f"index.{_DOCKERS_REGISTRY}"):
        return _DOCKERS_REGISTRY, path if "/" in path else f"library/{path}"
    return first, path


def tag_of(name: str, digest: str) -> str:
    """Return the name of an image that is built here: of the same files, the same."""
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "env"
    return f"{REPOSITORY}/{word}:{digest[:_DIGEST_LENGTH]}"
