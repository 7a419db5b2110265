# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for tests of an environment on a real server.

    def test_a_step(openenv_session):
        openenv_session.reset(seed=1)
        assert openenv_session.step({"message": "hi"}).reward > 0

    pytest --openenv-source=./my_env        or `openenv_source = "./my_env"` in the configuration

`openenv_env` launches the source once for the run, under a name of its own, and takes it down at
the end; each process of pytest-xdist has one. `openenv_session` is a session of it for one test.
A failed test that used them shows the end of the environment's log.
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .handles import Environment
    from .session import Session

MANIFEST = "openenv.yaml"
LOG_LINES = 30
_NAME = pytest.StashKey[str | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option and the setting that name the environment."""
    about = "what `openenv launch` takes: the environment of the fixture openenv_env"
    parser.getgroup("openenv").addoption("--openenv-source", metavar="SOURCE", help=about)
    parser.addini("openenv_source", about)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse the option's value as an argument of its own: pytest would take it for test files.

    Pytest also searches its root folder, and so its configuration, from all arguments with paths.

    Raises `pytest.UsageError`: the option and its value are separate arguments.
    """
    if "--openenv-source" in config.invocation_params.args:
        given = config.getoption("--openenv-source")
        raise pytest.UsageError(
            f"write --openenv-source={given}: with a blank, pytest takes the folder for one with"
            f" tests, and moves its root folder (here {config.rootpath})"
        )


@pytest.fixture(scope="session")
def openenv_env(pytestconfig: pytest.Config) -> Iterator[Environment]:
    """The ready environment, an `openenvd.client.Environment`."""
    from .errors import ApiRefused
    from .handles import Environment
    from .synchronous import Client

    source, client, name = _source(pytestconfig), Client(), f"pytest-{secrets.token_hex(4)}"

    def take_down() -> None:
        with contextlib.suppress(ApiRefused):  # nothing was launched, or it has stopped by itself
            Environment(client, {"name": name}).down().wait()

    atexit.register(take_down)  # in case a second Ctrl-C interrupts the `finally` below
    try:
        environment = client.launch(source, name=name, update=False).wait()
        pytestconfig.stash[_NAME] = name
        yield environment
    except ApiRefused as exc:
        pytest.fail(f"openenv_env: {exc}", pytrace=False)
    finally:
        pytestconfig.stash[_NAME] = None
        take_down()
        atexit.unregister(take_down)


@pytest.fixture
def openenv_session(openenv_env: Environment) -> Iterator[Session]:
    """A session of the environment, for one test."""
    with openenv_env.connect() as session:
        yield session


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the environment's log with a failed test that used it."""
    report = yield
    name = item.config.stash.get(_NAME, None)
    if report.failed and name is not None and "openenv_env" in getattr(item, "fixturenames", ()):
        from .errors import ClientError
        from .synchronous import Client

        try:
            log = "".join(Client(start=False).environment(name).logs(tail=LOG_LINES))
        except ClientError as exc:
            log = f"{exc.message}; {exc.hint}"
        report.sections.append((f"openenv logs {name}", log))
    return report


def _source(config: pytest.Config) -> str:
    """Return the source that the command line, the configuration or the root folder names.

    Raises `pytest.fail.Exception`: none of them names one. It is shown without a traceback.
    """
    for given, here in (
        (config.getoption("--openenv-source"), config.invocation_params.dir),
        (config.getini("openenv_source"), config.rootpath),
    ):
        if given:
            return str(here / given) if (here / given).is_dir() else str(given)
    if (config.rootpath / MANIFEST).is_file():
        return str(config.rootpath)
    pytest.fail(
        f"openenv_env: no environment is named, and {config.rootpath} has no {MANIFEST};"
        " give --openenv-source=./my_env",
        pytrace=False,
    )
