# SPDX-License-Identifier: Apache-2.0
"""The env host's interface to the shim: constants and values, by the standard library alone.

The shim sets environment variables, and reads the *notify pipe*, one JSON object a line:

    {"ready": true, "max_sessions": 64, "serving": "sessions",   once, when sessions can be accepted
     "shards": 4, "isolate": false, "notes": ["…"]}
    {"sessions_fail": "ImportError: …"}                          creating an environment has failed,
                                                                 also before ready; null: one was
    {"sessions": 3}                                              whenever the number has changed
    {"capacity": {"max_sessions": 64, "waiting", "refused", "steps", "step_timeouts",
     "lag_p99_seconds", "shards": {"alive": 4},
     "abandoned": [{"shard", "count", "since"}], "left": [{"pid", "name", "bytes"}]}}
                                                                 every 5 s, when it has changed
    {"shard_exit": {"shard": 2, "pid", "generation", "wait_status", "sessions": 3, "seconds",
     "peak_bytes", "isolated": false, "out_of_memory": false,
     "replaced_for": null, "reason": {…}, "number": 1, "at"}}
                                                                 a child has exited; with
     "shared_state": true and no shard: the process that held the shared state; with
     "programs": n: that many programs of the environment were killed for memory
    {"failed": "ImportError: …", "log_tail": [...]}               once, before it exits on its own
    {"draining": true}                                           once, when it begins no session any
                                                                 more, as it was asked
    {"sleeps": true}                                             once, before it exits unused
    {"stopped_by": 15}                                           a signal, before it exits with 0

`reason` is an `ExitReason`, which the server alone decides. `number` counts the reports.

`serving` is a `Serving`; `max_sessions` is null when sessions are not counted (with `as_is` and
`http`, which lack shards). `route` is one to try where there are no sessions. `notes`, if any, are
for its user. `sessions` of a `shard_exit`: how many ended with it. Error codes: `errors.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from ..system.text.options import option
from ..system.text.units import MB

NOTIFY_FD_VARIABLE = "OPENENVD_NOTIFY_FD"  # the writing end of the notify pipe
LISTEN_FD_VARIABLE = "OPENENVD_LISTEN_FD"  # the listening sockets, separated by commas
# The reading end of the start barrier, if any: connections are accepted when its other end closes.
GATE_FD_VARIABLE = "OPENENVD_GATE_FD"
# Set when a launch starts a server: whether an environment can be created is tried before ready.
TRIAL_VARIABLE = "OPENENVD_TRIAL"
CHILD_CONFIG_VARIABLE = "OPENENVD_CHILD_CONFIG"  # supervisor to a child that is started, not forked
HOST_CONFIG_VARIABLE = "OPENENVD_HOST_CONFIG"  # a `HostConfig` as JSON
# In containers, where the image holds the configuration: the fields that this replica overrides, as
# JSON, and the address to listen on, `HOST:PORT`.
HOST_OPTIONS_VARIABLE = "OPENENVD_HOST_OPTIONS"
LISTEN_ADDRESS_VARIABLE = "OPENENVD_LISTEN"
UMASK_VARIABLE = "OPENENVD_UMASK"  # of the user's shell, octal, for the daemon's children
CONTAINER_PORT = 8000  # upstream's images listen there, too

# Headers of every response, handshakes included, that identify the environment, launch and replica.
# A client that connects again asks whether it is still the same environment, and the same launch of
# it. Headers of every request that a gateway sends, too: who may have it (`serving/access.py`).
ENVIRONMENT_HEADER = "OpenEnvd-Environment"
GENERATION_HEADER = "OpenEnvd-Generation"  # the launch's request
REPLICA_HEADER = "OpenEnvd-Replica"

# Between a gateway and replicas (`websocket/handshake.py`).
RETRY_HEADER = "OpenEnvd-Retry"  # of an answer: nothing was begun, another replica may
ATTEMPTS_HEADER = "OpenEnvd-Attempts"  # in a handshake: the maximum number of replicas to try
ATTEMPT_HEADER = "X-Envoy-Attempt-Count"  # the number of this attempt

# Drains a replica that no signal can be sent to: POST with the secret of its `HostConfig`.
DRAIN_ROUTE = "/openenvd/drain"
DRAIN_HEADER = "OpenEnvd-Drain"

# The answer to a client that begins a session with an app without any; errors show it, too.
NO_SESSIONS = "this app has no sessions: no WebSocket at /ws speaks OpenEnv's protocol"

EXIT_FAILED_TO_START = 3  # it could not be imported or served; a `failed` line said why
DEFAULT_SESSIONS = 1024  # at once, by default, when the class supports concurrent sessions
MIN_SESSION_MEMORY_MB = 16  # a session's process holds about 14 before it has done anything
LOOPBACK = "127.0.0.1"
# The folder in a project's virtual environment with libraries that are the host's alone.
HOST_LIBRARIES = "openenvd-libraries"
DEFAULT_MESSAGE_MB = 100  # for one WebSocket message; the limit that upstream's client has, too
MAX_MESSAGE_BYTES = DEFAULT_MESSAGE_MB * MB
FAILURE_LOG_LINES = 20  # most lines of a traceback in a `failed` line


def door_path(prefix: str, replica: int) -> str:
    """Return the path of a replica's control socket (`ipc/fd_messages.py`)."""
    return f"{prefix}{replica}.door"


class Serving(StrEnum):
    """The application that answers the sessions."""

    SESSIONS = "sessions"  # the env host
    AS_IS = "as_is"  # the project's own app, untouched
    HTTP = "http"  # the project's own app, which has no sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of an env host. Each option is declared here and nowhere else."""

    max_sessions: int | None = option(
        None, "Maximum number of sessions, of all replicas.", least=1, most=1_000_000
    )
    shards: int | None = option(
        None,
        "Processes of each replica that serve sessions. `auto`, the default: one per core.",
        least=1,
        most=256,
        auto=True,
    )
    isolate: bool | None = option(
        None, "Run each session in its own process. Default: only if the class needs it."
    )
    session_memory_mb: int | None = option(
        None,
        "Memory limit of each session, such as 64M. Each session then runs in its own process.",
        least=MIN_SESSION_MEMORY_MB,
    )
    admission_timeout_seconds: float = option(
        5.0, "Time that a client waits for a session when all slots are taken.", least=0
    )
    step_timeout_seconds: float | None = option(
        None, "Time limit of a reset, step or tool. Past it the client gets an error.", above=0
    )
    reset_first: bool | None = option(
        None,
        "Refuse a session's steps before its first reset. Default: as the class says, else yes.",
    )
    http_session_idle_seconds: float = option(
        900.0, "A session without a WebSocket ends when unused for so long; 0: never.", least=0
    )
    max_message_mb: int = option(
        DEFAULT_MESSAGE_MB,
        "Size limit of a message or body that a client sends, such as 100M.",
        least=1,
        most=2048,
    )
    gpus: int | None = option(
        None, "GPUs of each replica. Its shards take them in turn.", least=0, most=64
    )
    serve_as_is: bool = option(False, "Run the project's own app, untouched.")
    host: str = option(
        LOOPBACK,
        "Address to listen on. One that others can reach needs a token.",
        metavar="ADDRESS",
    )
    allow_origin: list[str] = option(  # noqa: RUF009  a field with a factory
        list,
        "Origin whose web pages may connect: https://host. Clients may also use that host name. "
        "Repeatable.",
        metavar="ORIGIN",
    )
    token: str | None = option(
        None,
        "Token that clients must send. `auto` makes one, @FILE reads it. Default: `auto` where "
        "others can reach the environment.",
        metavar="auto|TOKEN|@FILE",
    )

    @property
    def wants_isolation(self) -> bool | None:
        """Return whether each session is to have a process; None: as the class needs it."""
        # A memory limit applies to a process: without a process per session it would limit nothing.
        return True if self.session_memory_mb is not None else self.isolate

    @property
    def session_memory_bytes(self) -> int | None:
        """The memory limit of one isolated session."""
        return None if self.session_memory_mb is None else self.session_memory_mb * MB

    @property
    def max_message_bytes(self) -> int:
        """The size limit of one message, or of the body of one request."""
        return self.max_message_mb * MB


@dataclass(frozen=True, slots=True)
class HostConfig(ServeOptions):
    """The configuration of an env host.

    Either `app_candidates` or `env_class` (`module:Class`) is set. `app_candidates` are for an
    upstream project: dotted `module:attribute` names, tried in order, each imported with
    `import_paths` in front of `sys.path`; if none of them exists, `app_fallbacks` are tried.
    `max_sessions` is this replica's share; None: `DEFAULT_SESSIONS` if the class allows, else 1.
    """

    name: str
    app_candidates: tuple[str, ...] = ()
    app_fallbacks: tuple[str, ...] = ()
    app_place: str = ""  # where the app is named: file and line, for messages
    env_class: str | None = None
    import_paths: tuple[str, ...] = ()
    venv: str | None = None  # made for this project: its byte code and notes are kept there
    replica: int = 0  # the number of this one
    doors: str = ""  # path prefix of all replicas' control sockets; empty: this replica has none
    shares_address: bool = False  # all replicas accept from the same sockets
    manifest: dict[str, Any] = field(default_factory=dict)  # openenv.yaml, for /metadata
    memory_bytes: int | None = None  # memory limit of the whole replica; None: none
    cores: int | None = None  # the same; None: as many as it may run on
    headers: dict[str, str] = field(default_factory=dict)  # of every answer: whose it is
    sleep_after_seconds: float | None = None  # without a connection; None: never
    umask: int | None = None  # of the user's shell; None: as the process is started
    owns_cgroup: bool = False  # nothing else runs in its cgroup: that of a container, or of a job
    drain_secret: str | None = None  # what `DRAIN_ROUTE` wants; None: there is no such route

    @property
    def refuses_unreset(self) -> bool | None:
        """Return whether steps before a first reset are refused; None: as the class says."""
        said = self.manifest.get("reset_first") if self.reset_first is None else self.reset_first
        return said if isinstance(said, bool) else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` can read."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HostConfig:
        """Read the configuration that `to_json` wrote, also that of another version."""
        known = {each.name for each in fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        for key in ("app_candidates", "app_fallbacks", "import_paths"):
            values[key] = tuple(values.get(key, ()))
        return cls(**values)
