# SPDX-License-Identifier: Apache-2.0
"""Remove images that were built here and that nothing uses any more.

    of a stage         the classic builder leaves it without a name
    replaced           another image has its name by now
    earlier version    a newer image of the same repository, `openenvd/NAME`, is there

An image stays while a run file of this home names it. If a run file cannot be used,
no image is removed, since its replica may need any of them. Docker itself keeps those of
containers, of other homes as well.
"""

from __future__ import annotations

from subprocess import TimeoutExpired

from ...schema.errors import EngineFailed
from ...schema.layout import Layout
from ...system.text.json_lines import Json
from .. import run_files
from ..image_names import REPOSITORY
from .image_build import DockerCli


def prune_images(layout: Layout) -> list[str]:
    """Remove images, and return their names, or their ids where they have none. Blocks.

    Nothing is removed if Docker does not answer, or if a run file was set aside.
    """
    if run_files.set_aside(layout.runs):
        return []
    try:
        docker = DockerCli(lambda _: None)
        found = docker.images_built()
    except (EngineFailed, TimeoutExpired):
        return []
    plans = (run_file.data.get("plan") or {} for run_file in run_files.all_of(layout.runs))
    used = {name for plan in plans for name in (plan.get("image"), plan.get("image_name"))}
    return [name for name in unused(found, used) if docker.remove(name)]


def unused(images: list[Json], used: set[str | None]) -> list[str]:
    """Return what may be removed of these images, as `docker image inspect` describes them.

    Args:
        images: Those that were built here.
        used: Ids and names of those that replicas run.
    """
    found = []
    named: dict[str, list[tuple[str, str, Json]]] = {}
    for image in images:
        names = image["RepoTags"] or []
        if not names and image["Id"] not in used:
            found.append(image["Id"])
        for name in names:
            repository, _, _ = name.rpartition(":")
            if repository.startswith(f"{REPOSITORY}/"):
                named.setdefault(repository, []).append((image["Created"], name, image))
    for versions in named.values():
        _, *earlier = sorted(versions, key=lambda each: each[0], reverse=True)
        found += [name for _, name, image in earlier if not {name, image["Id"]} & used]
    return found
