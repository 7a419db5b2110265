# SPDX-License-Identifier: Apache-2.0
"""An engine of plain processes, which shows all that an engine has to do: `--provider toy`.

    $TOY_ENGINE/NAME/instance.json    its id, which begins with NAME, and its labels
                     claimed/         made by the shell that starts the server, so that one does
                     state            the server's pid, then its exit code; the shell writes it
                     log              what the server prints

What a method has to do stands in `base.Engine`. Nothing limits what a server uses.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from openenvd.environments.engines import base, host_options
from openenvd.schema.protocol import LISTEN_FD_VARIABLE
from openenvd.system.net.listening_sockets import descriptors_text, open_listening_sockets

VARIABLE = "TOY_ENGINE"
POLL_SECONDS = 0.1
RUN = """
cd "$1" && mkdir claimed || exit
(cd "$2" && shift 2 && exec "$@") >>log 2>&1 &
echo $! >>state
wait $!
echo $? >>state
"""


def address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that says which toy engine it is: each has a folder."""
    return {VARIABLE: environ.get(VARIABLE) or f"{tempfile.gettempdir()}/toy-engine-{os.getuid()}"}


def check_options(options: Mapping[str, str], *, sandbox: bool) -> None:
    """Refuse what this engine does not have, before anything is started."""
    host_options.read_options("toy", options, {})
    host_options.check_no_sandbox("a replica is a plain process", sandbox=sandbox)


ENGINE = base.EngineEntry(
    "toy_engine:ToyEngine", base.Preparation.PROGRAM, address=address, check_options=check_options
)


class ToyEngine:
    """Runs each instance as a process of this machine."""

    def __init__(self) -> None:
        self._root = Path(os.environ[VARIABLE])

    def check(self) -> base.Check:
        return base.Check(version="1.0")

    def list(self) -> list[base.Instance]:
        return [one for path in self._root.glob("openenvd-*") if (one := self._read(path.name))]

    def find(self, plan: base.ReplicaPlan) -> base.Instance | None:
        found = self._read(plan.name)
        if found is None and self._folder(plan.name).exists():
            raise base.NameTaken(f"something that is not ours has the name {plan.name}")
        return found

    def start(self, plan: base.ReplicaPlan) -> base.Instance:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder, made = self._folder(plan.name), Path(tempfile.mkdtemp(dir=self._root))
        known = {"id": f"{plan.name}:{made.name}", "labels": plan.labels.to_labels()}
        (made / "instance.json").write_text(json.dumps(known))
        (made / "state").touch()
        with contextlib.suppress(OSError):  # there is one
            made.rename(folder)  # all of it at once
        shutil.rmtree(made, ignore_errors=True)
        if (found := self.find(plan)) is not None and (folder / "claimed").exists():
            return found
        assert found is not None
        sockets = open_listening_sockets(plan.host, plan.port)
        fds = [each.fileno() for each in sockets]
        ours = host_options.server_variables(plan.to_json(), plan.host, folder, owns_cgroup=False)
        env = {**plan.env, **ours, LISTEN_FD_VARIABLE: descriptors_text(fds)}
        argv = ["/bin/sh", "-c", RUN, "sh", str(folder), plan.folder, *plan.command]
        subprocess.Popen(argv, env=env, pass_fds=fds, start_new_session=True)
        for each in sockets:
            each.close()
        return found

    def changes(self) -> Iterator[None]:
        while True:
            yield
            time.sleep(POLL_SECONDS)

    def logs(self, instance: base.Instance, cursor: str | None) -> Iterator[base.LogChunk]:
        path, offset = self._folder(instance.id) / "log", int(cursor or 0)
        while (now := self._read(instance.id)) is not None:
            if data := path.read_bytes()[offset:] if path.exists() else b"":
                offset += len(data)
                yield base.LogChunk(data=data, cursor=str(offset))
            elif now.exit is not None:
                return
            time.sleep(POLL_SECONDS)

    def signal(self, instance: base.Instance, number: int) -> None:
        if (now := self._read(instance.id)) is not None and now.pid and now.exit is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(now.pid, number)

    def stop(self, instance: base.Instance, grace_seconds: float) -> None:
        deadline, folder = time.monotonic() + grace_seconds, self._folder(instance.id)
        with contextlib.suppress(OSError):  # it is there: the server has been started
            (folder / "claimed").mkdir()
            (folder / "state").write_text("0 143")
        self.signal(instance, signal.SIGTERM)
        while (now := self._read(instance.id)) is not None and now.exit is None:
            if time.monotonic() >= deadline:
                self.signal(instance, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def remove(self, instance: base.Instance) -> None:
        self.stop(instance, 0.0)
        if self._read(instance.id) is not None:
            shutil.rmtree(self._folder(instance.id))

    def _folder(self, id_or_name: str) -> Path:
        return self._root / id_or_name.partition(":")[0]

    def _read(self, id_or_name: str) -> base.Instance | None:
        folder = self._folder(id_or_name)
        try:
            known = json.loads((folder / "instance.json").read_bytes())
            told = [int(word) for word in (folder / "state").read_text().split()]
        except FileNotFoundError:
            return None
        labels = base.Labels.of(known["labels"])
        if labels is None or (":" in id_or_name and known["id"] != id_or_name):
            return None
        pid, state = told[0] if told else None, tuple(base.InstanceState)[len(told)]
        facts = base.ExitFacts(exit_code=told[1], evidence=f"process {pid}") if told[1:] else None
        return base.Instance(id=known["id"], labels=labels, state=state, pid=pid, exit=facts)
