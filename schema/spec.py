# SPDX-License-Identifier: Apache-2.0
"""`EnvironmentSpec`: what a user asked for when launching an environment.

    ServeOptions (env_host.protocol)   how sessions are served
    └── LaunchOptions                  and how replicas are started: flags of `openenv launch`,
        │                              fields of the launch's payload
        └── EnvironmentSpec            and what is launched, under which name

`sources/` turns a source into a program that runs; `engines/` runs it.

It also validates environments' names: a name becomes a folder, a label and part of an address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any

from ..system.net.access import TOKEN_PATTERN, is_loopback, new_token, read_origin
from ..system.text.options import option
from ..system.text.units import MB
from .errors import InvalidName
from .protocol import ServeOptions

LOCAL = "local"  # the provider that runs replicas on this machine, below shims
MAX_REPLICAS = 1000
AUTO = "auto"  # instead of a token: make one
GRACE_SECONDS = 5.0  # for sessions to end, between SIGTERM and SIGKILL
REPOSITORY_SCHEMES = ("git+https://", "hf://")  # of sources that are git repositories
DEFAULT_BASE = "python:3.11-slim"  # of images that are built here


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(ServeOptions):
    """The options of a launch. Each option is declared here and nowhere else."""

    provider: str = option(LOCAL, "Provider that runs the replicas.", metavar="NAME")
    replicas: int = option(
        1, "Number of env servers behind one address.", least=1, most=MAX_REPLICAS
    )
    min_replicas: int | None = option(
        None,
        "Fewest replicas when it scales itself [1]. 0: it sleeps when it is not used.",
        least=0,
        most=MAX_REPLICAS,
        own_flag="--min",
    )
    max_replicas: int | None = option(
        None,
        "Most replicas; it scales itself by its sessions.",
        least=1,
        most=MAX_REPLICAS,
        own_flag="--max",
    )
    scale_down_seconds: float = option(
        60.0, "Fewer replicas must have been enough for so long.", least=0
    )
    idle_timeout_seconds: float | None = option(
        None, "End its server when unused for so long. A client that connects starts it.", above=0
    )
    env: dict[str, str] = option(  # noqa: RUF009  a field with a factory
        dict, "A variable for the environment. Without a value, the one it has here. Repeatable."
    )
    with_packages: list[str] = option(  # noqa: RUF009  a field with a factory
        list,
        "Install this package, too. It stays apart from the project's own environment. Repeatable.",
        own_flag="--with",
        metavar="PACKAGE",
    )
    port: int | None = option(
        None, "Port to listen on, by default a free one.", least=1, most=65535
    )
    gateway: bool = option(
        False, "Balance sessions over the replicas with Envoy. Clients use the gateway's address."
    )
    memory_mb: int | None = option(
        None,
        "Memory limit of the launch and each replica: 2G. The launch installs dependencies.",
        least=32,  # the launch itself holds about 25
    )
    cpus: float | None = option(
        None, "CPU limit of each replica, on an engine: 0.5, 4.", above=0, most=4096, metavar="CPUS"
    )
    base: str = option(
        DEFAULT_BASE, "Base image of the images that are built for engines.", metavar="IMAGE"
    )
    sandbox: bool = option(
        False, "On an engine: read-only root, no capabilities. No new privileges either."
    )
    engine_options: list[str] = option(  # noqa: RUF009  a field with a factory
        list,
        "An option of the engine's own: shm-size=1g. Repeatable.",
        own_flag="--engine-option",
        metavar="NAME=VALUE",
    )
    ready_timeout_seconds: float = option(600.0, "Fail when it is not ready by then.", above=0)
    max_surge: str | None = option(
        None,
        "Extra replicas allowed during an update [100%] or a restart [1]: 2, 25%.",
        metavar="N|N%",
    )
    max_unavailable: str | None = option(
        None, "Replicas that may be missing during an update or restart [0].", metavar="N|N%"
    )

    def _check_range(self) -> None:
        most = self.max_replicas
        if most is None:
            if self.min_replicas is not None:
                raise ValueError("min_replicas: it scales itself only with a max_replicas")
            return
        for name in ("min_replicas", "replicas"):
            if (count := getattr(self, name) or 0) > most:
                raise ValueError(f"{name}: {count} is more than max_replicas, which is {most}")

    @property
    def sleep_seconds(self) -> float | None:
        """The seconds that it must be unused before its server ends; None: it never does."""
        return sleep_seconds_of(asdict(self))

    def _check_sleep(self) -> None:
        if self.sleep_seconds is None:
            return
        if self.provider != LOCAL or self.gateway or self.serve_as_is:
            name = "min_replicas" if self.idle_timeout_seconds is None else "idle_timeout_seconds"
            raise ValueError(
                f"{name}: an environment sleeps on this machine alone, without the gateway, and if"
                " its own server is not run as it is"
            )
        if self.min_replicas:
            raise ValueError(
                "min_replicas: an environment that sleeps has no minimum; leave out"
                f" {self.min_replicas}"
            )
        if self.replicas > 1 and self.max_replicas is None:
            raise ValueError(
                "idle_timeout_seconds: several replicas do not sleep; set max_replicas, so that"
                " they can scale down to one"
            )

    def check(self) -> None:
        """Check the options against each other. Raises `ValueError`: two contradict each other."""
        if self.session_memory_mb is not None and self.isolate is False:
            raise ValueError("session_memory_mb is for isolated sessions, and isolate is false")
        self._check_range()
        self._check_sleep()
        check_room(self.max_surge, self.max_unavailable)
        if self.gateway and self.port is not None:
            raise ValueError(
                "port: with a gateway, the port is the gateway's (--gateway-port of up)"
            )
        if self.serve_as_is and (self.wants_isolation or self.shards is not None):
            raise ValueError("serve_as_is runs the project's own server: one process, no shards")
        self._check_engine()
        for package in self.with_packages:
            if not package.strip() or package.startswith("-") or not package.isprintable():
                raise ValueError(f"with_packages: {package!r} is not a package")
        for origin in self.allow_origin:
            read_origin(origin)
        if self.token is not None and not re.fullmatch(f"{AUTO}|{TOKEN_PATTERN}", self.token):
            raise ValueError("token: write `auto`, or 16 to 256 letters, digits and any of -._~")

    def _check_engine(self) -> None:
        for text in self.engine_options:
            if not re.fullmatch(r"[a-z][a-z0-9-]*=.*", text):
                raise ValueError(f"engine_options: {text!r} is not written NAME=VALUE")
        asked = {"cpus": self.cpus, "sandbox": self.sandbox, "engine_options": self.engine_options}
        given = [name for name, value in asked.items() if value]
        if self.provider == LOCAL and given:
            raise ValueError(f"{', '.join(given)}: for engines alone, such as --provider docker")


def check_room(max_surge: str | None, max_unavailable: str | None) -> None:
    """Check the room for replacements; raises `ValueError` if it is no number, or too little."""
    for name, value in (("max_surge", max_surge), ("max_unavailable", max_unavailable)):
        if value is not None and not re.fullmatch(r"\d{1,4}%?", value):
            raise ValueError(f"{name}: {value!r} is not a number of replicas, nor a percentage")
    surge, unavailable = (int((text or "0").rstrip("%")) for text in (max_surge, max_unavailable))
    if max_surge is not None and not surge and not unavailable:
        raise ValueError("max_surge: nothing could be replaced unless max_unavailable is more")


def sleep_seconds_of(spec: Mapping[str, Any]) -> float | None:
    """Return the seconds that an environment must be unused before its last server ends."""
    seconds: float | None = spec.get("idle_timeout_seconds")
    if seconds is None and spec.get("min_replicas") == 0:
        seconds = spec.get("scale_down_seconds")
    return seconds


@dataclass(frozen=True, slots=True)
class EnvironmentSpec(LaunchOptions):
    """One environment as it is wanted."""

    name: str  # a path, a label and part of an address
    source: str  # a bundled name, an absolute folder with `openenv.yaml`, or `module:Class`

    def with_access(self, in_use: str | None = None) -> EnvironmentSpec:
        """This spec with a token, if it needs one, and origins as browsers spell them.

        The token `in_use`, which its clients have already, is kept unless another is given.
        """
        needs_one = self.token == AUTO or (self.token is None and not is_loopback(self.host))
        token = (in_use or new_token()) if needs_one else self.token
        origins = [read_origin(origin) for origin in self.allow_origin]
        return replace(self, token=token, allow_origin=origins)

    def with_range(self) -> EnvironmentSpec:
        """Return this spec, with at least `min_replicas` as `replicas`."""
        return replace(self, replicas=max(self.replicas, self.min_replicas or 1))

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit of each replica."""
        return None if self.memory_mb is None else self.memory_mb * MB

    @property
    def options_of_engine(self) -> dict[str, str]:
        """The engine's own options by name."""
        pairs = (text.partition("=") for text in self.engine_options)
        return {name: value for name, _, value in pairs}

    def or_else(self, **asked: Any) -> EnvironmentSpec:
        """Return this spec, with values of its `openenv.yaml` for options that are not given."""
        unsaid = {name: value for name, value in asked.items() if getattr(self, name) is None}
        return replace(self, **unsaid)


MAX_NAME_LENGTH = 63  # one DNS label

# Names as Docker allows them, and as Python does, since upstream's projects use Python names.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_UNUSABLE = re.compile(r"[^A-Za-z0-9_.-]+")


def validate_name(name: str) -> str:
    """Return the name if it is valid. Raises `InvalidName`."""
    if (reason := why_not(name)) is not None:
        raise InvalidName(reason, f"give it another one: --name {suggest_name(name)}")
    return name


def why_not(name: str) -> str | None:
    """Return why the text is not a valid name, and the first bad character; None if it is valid."""
    if not name:
        return "an environment's name is empty"
    if len(name) > MAX_NAME_LENGTH:
        return f"the name {name[:20]}… has {len(name)} characters; {MAX_NAME_LENGTH} are allowed"
    found = _NAME.match(name)
    if found is not None and found[0] == name:
        return None
    character = name[len(found[0]) if found else 0]
    where = "begin with" if _UNUSABLE.match(character) is None else "have"
    return (
        f"{name!r} cannot be an environment's name: it may not {where} {character!r}; letters a-z "
        "and A-Z, digits, '_', '-' and '.' are allowed, the last two not as the first"
    )


def suggest_name(text: str) -> str:
    """Return a valid name similar to `text`, or `env` if no character can be kept."""
    name = _UNUSABLE.sub("-", text.strip()).rstrip("-_.").lstrip("-.")
    return name[:MAX_NAME_LENGTH] or "env"


def without_ref(source: str) -> str:
    """Return a source without the branch, tag or commit of its repository, if it names one."""
    if not source.startswith(REPOSITORY_SCHEMES):
        return source
    whole, mark, subdirectory = source.partition("#")
    scheme, slashes, rest = whole.partition("://")
    return f"{scheme}{slashes}{rest.partition('@')[0]}{mark}{subdirectory}"


def name_of_source(source: str) -> str:
    """Name an environment after its source: `echo`, `my_env`, `sample`."""
    if source.startswith(REPOSITORY_SCHEMES):
        whole, _, subdirectory = without_ref(source).partition("#subdirectory=")
        source = (subdirectory or whole).rstrip("/").removesuffix(".git")
    _, colon, reference = source.rpartition(":")
    if colon and reference.replace(".", "_").isidentifier():
        return suggest_name(reference.rpartition(".")[2].lower())
    return suggest_name(PurePath(source).name)
