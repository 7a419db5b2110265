# SPDX-License-Identifier: Apache-2.0
"""`OpenEnvdProvider`: environments of the daemon for upstream's own client.

    env = await GenericEnvClient.from_env("org/name", provider=OpenEnvdProvider("./my_env"))
    env = await GenericEnvClient.from_env("org/name", use_docker=False, provider=…)
    env = GenericEnvClient(provider=OpenEnvdProvider("echo"))

It has the methods of both of upstream's interfaces (0.10.0, `core.containers.runtime.providers`):
`ContainerProvider` (`start_container`, `stop_container`, `wait_for_ready(base_url, timeout_s)`) and
`RuntimeProvider` (`start`, `stop`, `wait_for_ready(timeout_s)`). It is registered as a virtual
subclass of both, so that this module does not import upstream's package.

A daemon's environment has an address only once it is served, so a start returns when it is ready,
or raises the launch's error; `wait_for_ready` then returns at once.
"""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress
from typing import Self, Unpack

from ..system.text.json_lines import Json
from .errors import ClientError, NotFound, RequestFailed
from .handles import json_of
from .options import LaunchOptions
from .sources import read_source, working_folder
from .synchronous import Client

READY_SECONDS = 600.0  # a first launch installs the project's dependencies
_UPSTREAM_MODULE = "openenv.core.containers.runtime.providers"


class OpenEnvdProvider:
    """One environment, launched through the daemon, which is started when it is not running.

    Args:
        source: A source of `openenv launch`: a bundled name, a folder, or `module:Class`; None: the
            image's name that upstream passes to `start_container`.
        name: The environment's name; by default a new one, so that several providers of one source
            do not share an environment.
        env_vars: Environment variables of the replicas.
        context_timeout_s: Seconds the environment may take to get ready.
        options: The options of `openenv launch`: `replicas`, `max_sessions`, `port`, `token`, …
            Upstream's client gets the token with the address.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        env_vars: dict[str, str] | None = None,
        context_timeout_s: float = READY_SECONDS,
        **options: Unpack[LaunchOptions],
    ) -> None:
        self.context_timeout_s = context_timeout_s  # upstream reads it under this name
        self._source = None if source is None else os.fspath(source)
        self._name = name
        self._options: Json = {"ready_timeout_seconds": context_timeout_s, **options}
        self._env_vars = {**options.get("env", {}), **(env_vars or {})}
        self._base_url: str | None = None
        self._launched: str | None = None  # the name, while there is something to take down
        upstream = sys.modules.get(_UPSTREAM_MODULE)
        for interface in ("ContainerProvider", "RuntimeProvider"):
            if upstream is not None and hasattr(upstream, interface):
                getattr(upstream, interface).register(OpenEnvdProvider)

    @property
    def name(self) -> str | None:
        """The environment's name while it is up."""
        return self._launched

    @property
    def base_url(self) -> str:
        """The environment's address, with its token if it wants one.

        Raises:
            RuntimeError: It has not been started.
        """
        if self._base_url is None:
            raise RuntimeError("OpenEnvdProvider has not been started")
        return self._base_url

    def start(
        self,
        port: int | None = None,
        env_vars: dict[str, str] | None = None,
        *,
        workers: int | None = None,
    ) -> str:
        """Launch the environment, wait until it is ready, and return its address.

        Args:
            port: The environment's port; None: the one of the constructor.
            env_vars: Further environment variables of the replicas.
            workers: The number of replicas, which upstream may pass; None: of the constructor.

        Raises:
            RuntimeError: The environment is up already, or there is no source.
            RequestFailed: The launch failed; the message says why.
        """
        return self.start_container(None, port, env_vars, workers=workers)

    def stop(self) -> None:
        """Take the environment down, and wait until that is done; without one, do nothing."""
        name, self._launched, self._base_url = self._launched, None, None
        if name is None:
            return
        try:
            Client().submit("down", {"name": name}, {}, json_of).wait()
        except NotFound:
            pass  # it is down already
        except BaseException:
            self._launched = name  # upstream tries again
            raise

    def wait_for_ready(
        self, base_url: str | float | None = None, timeout_s: float | None = None
    ) -> None:
        """Return at once, because the start has waited until every replica answers.

        Upstream calls it in two forms: `(base_url, timeout_s)` and `(timeout_s)`.

        Raises:
            RuntimeError: The environment has not been started.
        """
        _ = self.base_url

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def start_container(
        self,
        image: str | None = None,
        port: int | None = None,
        env_vars: dict[str, str] | None = None,
        *,
        workers: int | None = None,
    ) -> str:
        """As `start`; `image` counts only when the provider was made without a source."""
        source = self._source or image
        if self._launched is not None:
            raise RuntimeError(f"OpenEnvdProvider is up already, as {self._launched}")
        if source is None:
            raise RuntimeError("OpenEnvdProvider needs a source: OpenEnvdProvider('./my_env')")
        own = read_source(source, working_folder()).name[:50]
        name = self._name or f"{own}-{secrets.token_hex(3)}"
        asked = {"port": port, "replicas": workers}
        given = self._options | {key: value for key, value in asked.items() if value}
        given["env"] = {**self._env_vars, **(env_vars or {})}
        # Without an update: another environment of this name is never stopped.
        request = Client().launch(source, name=name, update=False, **given)
        self._launched = name  # from here on there is something to take down
        try:
            self._base_url = request.wait().base_url()
        except RequestFailed:
            if self._name is None:  # the launch has stopped its replicas; remove the name, too
                with suppress(ClientError):  # the launch's own error is raised
                    self.stop()
            self._launched = None
            raise
        except BaseException:
            self.stop()
            raise
        return self.base_url

    stop_container = close = stop
