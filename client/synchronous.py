# SPDX-License-Identifier: Apache-2.0
"""`Client`: launches, rollouts, lists of environments and requests.

Each call finds the daemon or starts one, so a client outlives daemons and their updates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack

from ..schema.settings import Paths
from ..system.process.standard_streams import open_closed_streams
from ..system.text.json_lines import Json
from . import daemon as daemons
from .api import DaemonClient, RequestFilters
from .errors import DaemonUnreachable
from .handles import Environment, Request, environment_of, json_of
from .options import LaunchOptions, RequestOptions, RolloutOptions
from .sources import read_source, rollout_payload, working_folder

Result = TypeVar("Result")
Folder = str | os.PathLike[str]

_OF_REQUESTS = frozenset(RequestOptions.__annotations__)


class Client:
    """A client of this user's daemon.

    Args:
        home: The daemon's home; None: `OPENENV_HOME`, or the platform's state folder.
        start: Whether to start the daemon when none is running.

    Raises:
        ValueError: The home is an address.
    """

    def __init__(self, *, home: Folder | None = None, start: bool = True) -> None:
        open_closed_streams()  # before a socket gets a standard stream's descriptor
        environ = None if home is None else {"OPENENV_HOME": os.fspath(home)}
        self._paths = Paths.from_environment(environ)
        self._may_start = start

    def __repr__(self) -> str:
        return f"Client({str(self._paths.home)!r})"

    def launch(
        self,
        source: Folder,
        *,
        name: str | None = None,
        update: bool | None = None,
        **options: Unpack[LaunchOptions],
    ) -> Request[Environment]:
        """Start an environment, or update the one of this name.

        Args:
            source: A bundled name, a folder with `openenv.yaml`, `module:Class`, `docker://IMAGE`,
                `git+https://HOST/PATH@REF#subdirectory=FOLDER`, or `hf://ORG/NAME`.
                A path object is a folder.
            name: The environment's name; None: made from the source.
            update: Whether to update a running environment of this name; None: if it was launched
                from the same source.
            options: The options of `openenv launch`.

        Raises:
            ApiRefused: An option is wrong, or the name is taken.
        """
        here = working_folder()
        is_folder = isinstance(source, os.PathLike)  # even if a bundled environment has its name
        found = read_source(f"{os.fspath(source)}/" if is_folder else str(source), here)
        payload = {
            "name": found.name if name is None else name,
            "source": found.text,
            "cwd": str(here),
            "update": update,
        }
        return self.submit("launch", payload, options, environment_of)

    def rollout(
        self, *environments: Environment | str, out: Folder, **options: Unpack[RolloutOptions]
    ) -> Request[Json]:
        """Play episodes, and write them to a folder; a repeated call plays the missing ones.

        Args:
            environments: Environments of this daemon, or the URLs of any.
            out: The folder.
            options: The options of `openenv rollout`.
        """
        names = [each if isinstance(each, str) else each.name for each in environments]
        if not names:
            raise TypeError("rollout() needs an environment")
        for name in names:
            if "://" not in name:
                self.environment(name)  # an unknown one is refused at once, with similar names
        return self.submit("rollout", {}, rollout_payload(names, out, options), json_of)

    def submit(
        self,
        operation: str,
        payload: Mapping[str, Any],
        options: Mapping[str, Any],
        read_result: Callable[[Client, Json], Result],
    ) -> Request[Result]:
        """Queue any operation of the API.

        Args:
            operation: Its name.
            payload: Its payload, as `docs/api.md` describes it; None leaves a field out.
            options: Further fields of the payload, and those of `RequestOptions`.
            read_result: Makes the result of `wait` from the API's JSON.
        """
        of_request = {name: value for name, value in options.items() if name in _OF_REQUESTS}
        fields = {**payload, **{k: v for k, v in options.items() if k not in _OF_REQUESTS}}
        given = {name: value for name, value in fields.items() if value is not None}
        return Request(self, self.daemon().submit(operation, given, **of_request), read_result)

    def environments(self) -> list[Environment]:
        """List every environment that is wanted, or that failed."""
        return [Environment(self, data) for data in self.daemon().environments()]

    def environment(self, name: str) -> Environment:
        """Return one environment by its name.

        Raises:
            ApiRefused: There is none of this name.
        """
        return Environment(self, self.daemon().environment(name))

    def requests(self, **filters: Unpack[RequestFilters]) -> list[Request[Json]]:
        """List the queue and its history, newest first."""
        return [Request(self, data, json_of) for data in self.daemon().requests(**filters)]

    def request(self, request_id: str) -> Request[Json]:
        """Return one request by its id, or the beginning of it."""
        return Request(self, self.daemon().request(request_id), json_of)

    def status(self) -> Json:
        """Return what `openenv status --json` prints."""
        return self.daemon().status()

    def info(self) -> Json:
        """Return what `openenv info --json` prints: limits, workers, settings."""
        return self.daemon().info()

    def daemon(self) -> DaemonClient:
        """Find the daemon, or start it.

        Raises:
            DaemonUnreachable: None is running and none may be started, or it cannot start.
        """
        if self._may_start:
            return daemons.connect(self._paths)
        if (found := self.find_daemon()) is None:
            raise DaemonUnreachable(f"no daemon runs in {self._paths.home}", "openenv up")
        return found

    def find_daemon(self) -> DaemonClient | None:
        """Find the daemon; None when none is running."""
        return daemons.find(self._paths)
