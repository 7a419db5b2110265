# SPDX-License-Identifier: Apache-2.0
"""The work of a replica's actor on its node: it starts a shim, as a local replica has one.

    actor (a worker of Ray's) ──starts──▶ shim ──▶ env host ──▶ its sessions
       │  thread ◀──── status ─────────────┘
       └──▶ the cluster's KV: where it listens, and how it has ended

On the agent's own node, the server listens at the plan's address; on another, at the node's. If the
port is taken, it listens at another one, which the report has.

Failure cases

    the actor is killed      by `ray.kill`, by Ray's memory monitor, with its node's raylet: the
                             kernel sends the shim SIGTERM, which ends its server within its grace
    the shim is killed       the kernel kills the server; the report says that it is lost
    the cluster is away      the report is written again until the cluster has it
    the actor is killed and  its folder stays in the folder of Ray's session, as Ray's own logs do
    its folder is left

The module imports the standard library and Ray alone, as it runs in any Python of a cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.experimental import internal_kv

from ....system.net.listening_sockets import descriptors_text, http_address
from ....system.process.prctl import die_with_parent
from ....system.text.json_lines import Json
from ...shim import __file__ as _shim_file
from ...shim import files
from ...shim.client import ShimClient, ShimGone, clean_up_after_shim, read_status_file
from ..host_options import listen, server_variables

if TYPE_CHECKING:
    from ....schema.replica import StatusLine

NAMESPACE = "openenvd"  # of actors and placement groups, and of these keys
RECORD = "replica:{}"
REPORT = "report:{}"
_KEYS = NAMESPACE.encode()
READ_BYTES = 256 * 1024
RETRY_SECONDS = 1.0
HEARD_SECONDS = 5.0  # for the shim to read a request
CLOSE_SECONDS = 10.0  # for the shim to end everything by SIGKILL
MAX_LOG_BYTES = 64 * 2**20  # on the node; the agent's copy is limited by a setting
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class RayReplica:
    """The shim of one replica, which the replica's actor starts and watches."""

    def __init__(self, settings: Json) -> None:
        """Start the shim; if that fails, the error is raised, and ends the actor."""
        self._settings = settings
        self._plan: Json = settings["plan"]
        self._actor_id = str(ray.get_runtime_context().get_actor_id())
        self._report: Json = {}
        node: Any = ray._private.worker._global_node
        session_folder = Path(node.get_session_dir_path())  # of Ray, on this node
        self._folder = session_folder / "openenvd" / self._actor_id
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket_path = _socket_path(self._folder)
        self._log_path = self._folder / "log"
        self._listeners = self._listen()
        self._started: Future[None] = Future()
        # The kernel signals the shim at the death of the thread that started it.
        threading.Thread(target=self._run, name="shim", daemon=True).start()
        self._started.result()

    def read_log(self, offset: int) -> tuple[bytes, int, bool]:
        """Return the output after an offset, the next offset, and whether the output has ended."""
        has_ended = self._report.get("exit") is not None
        try:
            with self._log_path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < offset:  # its beginning was dropped
                    offset = 0
                data = os.pread(file.fileno(), READ_BYTES, offset)
        except FileNotFoundError:  # `close` has removed it
            return b"", offset, True
        return data, offset + len(data), has_ended

    def signal(self, number: int) -> None:
        """Send a signal to the server, if it runs."""
        status = read_status_file(self._folder) or {}
        if (pid := status.get("pid")) and status.get("exit") is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self, grace_seconds: float) -> None:
        """Make the shim stop its server; another call can only shorten the grace."""
        gone = contextlib.suppress(ShimGone, TimeoutError)
        with gone, ShimClient.connect(self._socket_path) as shim:
            shim.send("stop", grace_seconds=grace_seconds)
            # A client that disconnects at once may be dropped before its line is read.
            shim.wait(lambda status: status["state"] in ("stopping", "stopped"), HEARD_SECONDS)

    def close(self) -> None:
        """Stop everything at once, and remove the folder."""
        gone = contextlib.suppress(ShimGone, TimeoutError)
        with gone, ShimClient.connect(self._socket_path) as shim:
            shim.send("stop", grace_seconds=0.0)
            shim.wait(lambda status: False, CLOSE_SECONDS)
        clean_up_after_shim(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self) -> list[socket.socket]:
        """Open sockets: on the agent's node at the plan's address, elsewhere at the node's own."""
        node_address = ray.util.get_node_ip_address()
        is_here = node_address == self._settings["agent_address"]
        host = self._plan["host"] if is_here else node_address
        listeners = listen(host, int(self._plan["port"]))
        port = int(listeners[0].getsockname()[1])
        is_planned = is_here and port == self._plan["port"]
        self._report["address"] = None if is_planned else http_address(host, port)
        self._report["host"], self._report["port"] = host, port
        return listeners

    def _run(self) -> None:
        """Start the shim, and report its states, in a thread that lives as long as the actor."""
        try:
            shim = self._start()
        except BaseException as exc:
            self._started.set_exception(exc)
            return
        self._started.set_result(None)
        with contextlib.suppress(ShimGone):
            while True:
                self._write_report(shim.wait(lambda status: self._is_news(_observed(status))))
        self._write_report(read_status_file(self._folder) or {}, is_gone=True)
        threading.Event().wait()  # the end of this thread would end the shim

    def _start(self) -> ShimClient:
        files.write_json(str(self._folder / files.RUN_FILE_NAME), self._run_file())
        program = Path(_shim_file).with_name("__main__.py")
        fds = [one.fileno() for one in self._listeners]
        with files.open_control_socket(self._socket_path) as control:
            environ = {
                files.CONTROL_FD_VARIABLE: str(control.fileno()),
                files.LISTEN_FD_VARIABLE: descriptors_text(fds),
            }
            with self._log_path.open("ab") as log:
                subprocess.Popen(
                    [sys.executable, "-I", "-S", str(program), str(self._folder)],
                    env=os.environ | environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[control.fileno(), *fds],
                    preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
                )
        for one in self._listeners:
            one.close()
        return ShimClient.connect(self._socket_path)

    def _run_file(self) -> Json:
        plan, folder, argv = self._plan, Path(self._plan["folder"]), self._plan["command"]
        if self._settings["runtime_env"]:  # in the Python of that environment
            program = Path(_shim_file).parents[2] / "env_host" / "__main__.py"
            argv = [sys.executable, "-P", str(program)]
        gpus = {name: os.environ[name] for name in _GPU_VARIABLES if name in os.environ}
        options = server_variables(plan, self._report["host"], self._folder, owns_cgroup=False)
        return {
            "replica_id": plan["labels"]["replica"],
            "argv": list(argv),
            "env": {**plan["env"], **gpus, **options},
            "cwd": str(folder if folder.is_dir() else Path.cwd()),
            "host": self._report["host"],
            "port": self._report["port"],
            "socket_path": str(Path(self._socket_path).resolve()),
            "log_path": str(self._log_path),
            "max_log_bytes": MAX_LOG_BYTES,
            "memory_limit_bytes": plan["memory_bytes"],
            "cgroups": f"ray-{plan['labels']['home']}",
        }

    def _is_news(self, observed: Json) -> bool:
        """Return whether a report is due: it differs, and the server has a pid or has exited."""
        is_begun = bool(observed["pid"] or observed["exit"])
        return is_begun and not observed.items() <= self._report.items()

    def _write_report(self, status: StatusLine, *, is_gone: bool = False) -> None:
        self._report |= _observed(status)
        if is_gone and self._report["exit"] is None:
            self._report["exit"] = {"kind": "lost"}
        while True:  # until the cluster has it
            try:
                write_key(REPORT.format(self._actor_id), self._report)
                return
            except Exception:
                time.sleep(RETRY_SECONDS)


def _observed(status: StatusLine) -> Json:
    """Return the server's pid and exit from a shim's status."""
    exit_reason = status.get("exit")
    if exit_reason is None and status.get("state") == "stopped":
        exit_reason = {"kind": "stopped"}
    return {"pid": status.get("pid"), "exit": exit_reason}


def _socket_path(folder: Path) -> str:
    """Return the path of the shim's socket, as this process connects to it.

    A socket's path has 107 bytes at most: nearly as many as that of Ray's session folder. In the
    temporary folder, an actor that is killed together with its shim would leave the socket.
    """
    if sys.platform != "linux":
        return str(Path(tempfile.gettempdir()) / f"oer-{folder.name[:20]}.sock")
    return f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}/shim.sock"


# JSON objects in the cluster's KV, which is in its GCS. `cluster.py` lists the keys.


def read_key(key: str) -> Json | None:
    """Return the JSON object of a key; None when there is none."""
    data: bytes | None = internal_kv._internal_kv_get(key, namespace=_KEYS)
    try:
        found = json.loads(data or b"null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def write_key(key: str, value: Json) -> None:
    """Replace the object of a key."""
    data = json.dumps(value).encode()
    internal_kv._internal_kv_put(key, data, overwrite=True, namespace=_KEYS)


def delete_key(key: str) -> None:
    """Remove a key, if it is there."""
    internal_kv._internal_kv_del(key, namespace=_KEYS)


def list_keys(pattern: str) -> list[str]:
    """Return the keys of a kind: `RECORD`, `REPORT`."""
    found = internal_kv._internal_kv_list(pattern.format(""), namespace=_KEYS)
    return [key.decode() for key in found]
