# SPDX-License-Identifier: Apache-2.0
"""A real node, for all tests of this folder, and homes whose daemons use it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.schema.spec import DEFAULT_BASE

from ..conftest import smoke_cache
from ..engines import docker_engine
from ..providers.harness import Harness, home_of
from ..providers.under_test import Kubernetes
from .cluster import Cluster


@pytest.fixture(scope="session")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    """The provider of the conformance suite; its node has the sample's image and the base."""
    made = Kubernetes()
    if (why_not := made.why_not()) is not None:
        pytest.skip(why_not)
    with smoke_cache() as cache:
        base = docker_engine.base_image(cache)
    with made.engine(tmp_path_factory.mktemp("kubernetes")):
        made.cluster.load_files([base], DEFAULT_BASE, [])
        yield made


@pytest.fixture
def real(provider: Kubernetes) -> Cluster:
    return provider.cluster


@pytest.fixture
def harness(provider: Kubernetes, tmp_path: Path) -> Iterator[Harness]:
    with home_of(provider, tmp_path) as made:
        yield made
