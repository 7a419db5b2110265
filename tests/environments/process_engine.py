# SPDX-License-Identifier: Apache-2.0
"""An engine of plain processes below a directory: a real one, small enough for the fast tests.

    $PROCESS_ENGINE/<name>/plan.json     what was started: its labels
                           pid           its process and when that was started
                           log           what it prints
                           exit          how it ended, as a shell says it
                           told          what else is to be told of it: fields of `Instance`
                    events               grows with every change
    $PROCESS_ENGINE.gone                 while this exists, the engine does not answer
                   .refuses              while this exists, it refuses to find anything
                   .broken               while this exists, finding anything fails by a defect
                   .address              where instances may be reached: `http://127.0.0.2:{port}`
                   .surprises            while this exists, so do listing all and reading logs
                   .slow                 while this exists, nothing is started yet
                   .silent               while this exists, servers take no signals

The image is a Python file, which is given its port by the variable PORT. A small shell stays above
each process and writes down how it ended, so that no agent needs to be its parent; it also sees to
it that what is started twice runs once.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from openenvd.environments.engines import base
from openenvd.environments.shim.client import spawn_detached
from openenvd.schema.errors import NotAnswering

DIRECTORY_VARIABLE = "PROCESS_ENGINE"
POLL_SECONDS = 0.02
INHERITED = ("PATH", "OPENENV_HOME")
# A file appears whole: it is moved to its place.
_RUN = """
cd "$1"
mkdir claimed 2>/dev/null || exit 0
setsid "$2" -u "$3" >>log 2>&1 & child=$!
echo $child >pid.new && mv pid.new pid && echo started >>../events
wait $child
echo $? >exit.new && mv exit.new exit && echo exited >>../events
"""


class ProcessEngine:
    """Runs each instance as a process of this machine."""

    def __init__(self) -> None:
        self.root = Path(os.environ[DIRECTORY_VARIABLE])
        self._is_closed = False

    def check(self) -> base.Check:
        try:
            self._ask()
        except base.EngineGone as exc:
            return base.Check(problem=exc.message, remedy=f"rm {self.root}.gone")
        return base.Check(version="1")

    def list(self) -> list[base.Instance]:
        self._ask()
        if self.root.with_suffix(".surprises").exists():
            raise AttributeError("'NoneType' object has no attribute 'items'")
        return [self._read(folder) for folder in self.root.iterdir() if self._is_one(folder)]

    def find(self, plan: base.ReplicaPlan) -> base.Instance | None:
        self._ask()
        if self.root.with_suffix(".refuses").exists():
            raise base.EngineRefused("the engine of processes is in a bad way")
        if self.root.with_suffix(".broken").exists():
            raise ValueError("not enough values to unpack")
        folder = self.root / plan.name
        return self._read(folder) if self._is_one(folder) else None

    def start(self, plan: base.ReplicaPlan) -> base.Instance:
        while self.root.with_suffix(".slow").exists():
            time.sleep(POLL_SECONDS)
        self._ask()
        if not Path(plan.image).is_file():
            raise base.EngineRefused(f"there is no image {plan.image}", f"touch {plan.image}")
        folder = self.root / plan.name
        made = Path(tempfile.mkdtemp(dir=self.root, prefix="new-"))
        (made / "log").touch()
        (made / "plan.json").write_text(json.dumps(plan.to_json()))
        try:
            made.rename(folder)  # all of it at once
        except OSError:
            shutil.rmtree(made)
        inherited = {name: os.environ[name] for name in INHERITED}
        environ = {**inherited, "PORT": str(plan.port), **plan.env}
        argv = ["/bin/sh", "-c", _RUN, "sh", str(folder), sys.executable, plan.image]
        spawn_detached(argv, environ, pass_fds=(), log_path=os.devnull)
        self._has_changed()
        return self._read(folder)

    def changes(self) -> Iterator[None]:
        self._ask()
        yield
        size = self._size_of_events()
        while not self._is_closed:
            self._ask()
            if (now := self._size_of_events()) != size:
                size = now
                yield
            time.sleep(POLL_SECONDS)

    def logs(self, instance: base.Instance, cursor: str | None) -> Iterator[base.LogChunk]:
        folder, offset = self.root / instance.id, int(cursor or 0)
        if self.root.with_suffix(".surprises").exists():
            raise AttributeError("'NoneType' object has no attribute 'items'")
        while not self._is_closed:
            self._ask()
            has_ended = not folder.exists() or (folder / "exit").exists()
            try:
                with (folder / "log").open("rb") as log:
                    log.seek(offset)
                    data = log.read()
            except FileNotFoundError:
                return
            if data:
                offset += len(data)
                yield base.LogChunk(data=data, cursor=str(offset))
            elif has_ended:
                return
            time.sleep(POLL_SECONDS)

    def signal(self, instance: base.Instance, number: int) -> None:
        self._ask()
        if self.root.with_suffix(".silent").exists():
            raise NotAnswering("nothing answers at its address")
        pid = self._pid(self.root / instance.id)
        if pid is not None and not (self.root / instance.id / "exit").exists():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return

    def stop(self, instance: base.Instance, grace_seconds: float) -> None:
        deadline = time.monotonic() + grace_seconds
        folder = self.root / instance.id
        self.signal(instance, signal.SIGTERM)
        while folder.exists() and not (folder / "exit").exists():
            if time.monotonic() >= deadline:
                self.signal(instance, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def remove(self, instance: base.Instance) -> None:
        self.stop(instance, 0.0)
        shutil.rmtree(self.root / instance.id, ignore_errors=True)
        self._has_changed()

    def close(self) -> None:
        self._is_closed = True

    def _ask(self) -> None:
        if self.root.with_suffix(".gone").exists():
            raise base.EngineGone("the engine of processes does not answer", "start it")
        self.root.mkdir(parents=True, exist_ok=True)

    def _is_one(self, folder: Path) -> bool:
        return folder.name.startswith("openenvd-") and (folder / "plan.json").exists()

    def _read(self, folder: Path) -> base.Instance:
        plan = json.loads((folder / "plan.json").read_bytes())
        pid = self._pid(folder)
        state = base.InstanceState.STARTING if pid is None else base.InstanceState.RUNNING
        facts = None
        if (folder / "exit").exists():
            state = base.InstanceState.EXITED
            code = int((folder / "exit").read_text())
            facts = base.ExitFacts(exit_code=code, is_oom=(folder / "oom").exists())
        labels = base.Labels(**plan["labels"])
        elsewhere = self.root.with_suffix(".address")
        address = elsewhere.read_text() if elsewhere.exists() else None
        drains = "SIGUSR1" in Path(plan["image"]).read_text()
        found = base.Instance(
            id=folder.name,
            labels=labels,
            state=state,
            pid=pid,
            address=address and address.format(port=plan["port"]),
            drains=drains,
            exit=facts,
        )
        if not (folder / "told").exists():
            return found
        told = json.loads((folder / "told").read_text())
        return replace(found, **told | {"state": base.InstanceState(told.get("state", state))})

    def tell(self, instance: base.Instance, **fields: Any) -> None:
        path = self.root / instance.id / "told"
        path.with_suffix(".new").write_text(json.dumps(fields))
        path.with_suffix(".new").rename(path)
        self._has_changed()

    def _pid(self, folder: Path) -> int | None:
        try:
            return int((folder / "pid").read_text())
        except FileNotFoundError:
            return None

    def _size_of_events(self) -> int:
        try:
            return (self.root / "events").stat().st_size
        except FileNotFoundError:
            return 0

    def _has_changed(self) -> None:
        with (self.root / "events").open("a") as events:
            events.write("changed\n")
