# SPDX-License-Identifier: Apache-2.0
"""Tests each fact on each provider: `--provider NAME`, or by default all that can run here.

A provider that cannot run here, and a fact that does not apply, are skipped with the reason;
`python -m smoke_tests.providers` makes a table of the outcomes, and fails for other skips.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .harness import Harness, home_of, running
from .page import DOES_NOT_APPLY, WORDS
from .under_test import PROVIDERS, WITH_EXAMPLE, UnderTest

MakeHarness = Callable[[str], Harness]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--provider", action="append", help="Provider to try; repeatable.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "provider" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--provider", default=None) or list(PROVIDERS)
        metafunc.parametrize("provider", chosen, indirect=True, scope="session")


@pytest.fixture(scope="session")
def provider(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[UnderTest]:
    with running(WITH_EXAMPLE[request.param](), tmp_path_factory) as provider:
        yield provider


@pytest.fixture
def make_harness(
    request: pytest.FixtureRequest, provider: UnderTest, tmp_path: Path
) -> Iterator[MakeHarness]:
    if why := provider.does_not_apply.get(request.node.originalname):
        pytest.skip(DOES_NOT_APPLY + why)
    if why := provider.does_not_hold.get(request.node.originalname):
        request.node.add_marker(pytest.mark.xfail(reason=why, strict=True))
    with ExitStack() as homes:

        def make(folder: str) -> Harness:
            (tmp_path / folder).mkdir()
            harness = homes.enter_context(home_of(provider, tmp_path / folder))
            request.node.user_properties.append((WORDS, harness.words))
            return harness

        yield make


@pytest.fixture
def harness(make_harness: MakeHarness) -> Harness:
    return make_harness("one")
