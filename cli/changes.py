# SPDX-License-Identifier: Apache-2.0
"""`Changes`: a thread that listens to the daemon's event stream while something else draws.

    thread  changes ──▶ /v1/events ──▶ `happened` is set ──▶ whoever draws reads, and clears it

The stream breaks when the daemon exits or drops a slow reader. The thread then looks for it,
and never starts one. When there is none, `problem` says so: for good, or, when patient, until it is
back.
"""

from __future__ import annotations

import threading

from ..client.api import DaemonClient
from ..client.errors import ClientError, ConnectionLost
from .options import reconnect

_LOOK_AGAIN_SECONDS = 0.5


class Changes:
    """Tells that something has changed.

    Attributes:
        client: The daemon as it was found last.
        happened: Set at each change; the reader clears it before it reads.
        problem: Why there is no daemon; None while there is one.
    """

    def __init__(self, client: DaemonClient, *, is_patient: bool = False) -> None:
        self.client = client
        self.happened = threading.Event()
        self.problem: ClientError | None = None
        self._is_patient = is_patient
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="changes", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and the calls of its client."""
        self._stopped.set()
        self.client.close()
        self._thread.join()

    def _listen(self) -> None:
        after: str | None = None
        while self.problem is None and not self._stopped.is_set():
            try:
                for event in self.client.changes(after=after):
                    after = event.id
                    self.happened.set()
            except ClientError:
                pass  # the stream's end and its break are answered alike
            self._come_back()
            self.happened.set()  # whatever was missed

    def _come_back(self) -> None:
        while not self._stopped.is_set() and not self._finds_daemon():
            self.happened.set()
            if not self._is_patient:
                return
            self._stopped.wait(_LOOK_AGAIN_SECONDS)

    def _finds_daemon(self) -> bool:
        try:
            found = reconnect()
        except ClientError as exc:
            self.problem = exc
            return False
        if found is None:
            self.problem = ConnectionLost("the daemon has exited", "openenv up starts a new one")
            return False
        self.client, self.problem = found, None
        return True
