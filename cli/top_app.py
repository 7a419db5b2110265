# SPDX-License-Identifier: Apache-2.0
"""`TopApp`: the screen of `openenv top`, with Textual.

    thread  changes ──▶ /v1/events ──▶ `happened` ─┐
    thread  reader  ◀──────────────────────────────┘ or REFRESH_SECONDS without a change
               └─▶ /v1/status, /v1/info ──message──▶ app: tables, lines, what has died
    a thread for each action ──▶ one call ──message──▶ app: a notification

What is shown is made by `top_view.py`; only the widgets are here.

    What goes wrong            What is done
    the daemon exits           the last picture stays under a line that says so, until it is back
    it is of another version   the same line says that, and the command that helps
    an action is refused       a notification with the daemon's own words
    many changes at once       one picture, at most one each LEAST_PAUSE_SECONDS
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import click
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, RichLog, Static

from ..client.api import DaemonClient
from ..client.errors import ClientError
from ..requests_db.states import FINAL_STATES, ReplicaState
from ..system.terminal_text import TextStream, plain
from . import phrases, top_view
from .changes import Changes
from .drawing import Cell
from .options import reconnect
from .top_view import Death, Row, Seen

REFRESH_SECONDS = 2.0  # memory and sessions change without an event
LEAST_PAUSE_SECONDS = 0.25  # between two readings, however much happens
LOG_LINES = 200  # of a log, before what is followed
MOST_LOG_LINES = 10_000
DEATHS_SHOWN = 3
_DIALOG_CSS = """
    align: center middle;
    & > Vertical {
        width: auto; min-width: 40; max-width: 90%; height: auto; border: heavy; padding: 0 1;
    }
    & Static { width: auto; }
    & Input { width: 36; }
"""


class Panel(DataTable[Text]):
    """A table whose last column takes the width that is left; it keeps its place in new rows."""

    def __init__(self, title: str, headings: tuple[str, ...]) -> None:
        super().__init__(cursor_type="row", id=title.lower(), zebra_stripes=False)
        self.border_title = title
        self._headings = headings
        self._rows: list[Row] = []
        self._widths: list[int] = []

    @property
    def selected(self) -> Row | None:
        """The row that the cursor is on."""
        return self._rows[self.cursor_row] if 0 <= self.cursor_row < len(self._rows) else None

    def rows_about(self, kind: str) -> list[dict[str, Any]]:
        """Return what the rows of a kind are about."""
        return [row.about for row in self._rows if row.key.startswith(f"{kind} ")]

    def show(self, rows: list[Row]) -> None:
        """Show these rows in place of others."""
        chosen, same = self.selected, [row.key for row in rows] == [row.key for row in self._rows]
        self._rows = rows
        widths, table = top_view.fit(self._headings, rows, self.content_size.width)
        if same and widths == self._widths:
            self._update(table)
            return
        self._widths = widths
        top = self.scroll_y
        self.clear(columns=True)
        for heading, width in zip(self._headings, widths, strict=True):
            self.add_column(Text(heading, "bold"), width=width)
        for row, line in zip(rows, table, strict=True):
            self.add_row(*map(_text, line), key=row.key)
        keys = [row.key for row in rows]
        if chosen is not None and chosen.key in keys:
            self.move_cursor(row=keys.index(chosen.key), scroll=False)
            self.scroll_to(y=top, animate=False)

    def _update(self, table: list[list[Cell]]) -> None:
        for row, line in enumerate(table):
            for column, cell in enumerate(line):
                text = _text(cell)
                if self.get_cell_at((row, column)) != text:  # type: ignore[arg-type]  # a Coordinate is a tuple
                    self.update_cell_at((row, column), text)  # type: ignore[arg-type]

    def on_resize(self, _: Resize) -> None:
        """Cut the texts anew."""
        self.show(list(self._rows))


def _text(cell: Cell) -> Text:
    return Text.from_ansi(click.style(cell.text, **cell.style)) if cell.style else Text(cell.text)


class Confirm(ModalScreen[bool]):
    """Asks before something is lost."""

    CSS = f"Confirm {{ {_DIALOG_CSS} }}"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "dismiss(True)", "Yes"),
        ("n,escape,q", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question

    def compose(self) -> ComposeResult:
        """Make the dialog."""
        with Vertical():
            yield Static(Text(plain(self.question)))
            yield Static(Text("y: yes   n: no", "bold"))


class AskNumber(ModalScreen[int | None]):
    """Asks for a number from 1."""

    CSS = f"AskNumber {{ {_DIALOG_CSS} }}"
    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss(None)", "Back")]

    def __init__(self, question: str, value: int) -> None:
        super().__init__()
        self._question, self._value = question, value

    def compose(self) -> ComposeResult:
        """Make the dialog."""
        with Vertical():
            yield Static(Text(plain(self._question)))
            yield Input(str(self._value), type="integer", max_length=5)
            yield Static(Text("Enter: do it   Esc: back", "bold"))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Answer with the number; anything else is not an answer."""
        if event.value.isdecimal() and int(event.value) >= 1:
            self.dismiss(int(event.value))
        else:
            self.notify("a number from 1", severity="error")


class Logs(Screen[None]):
    """Follows one log, through a client of its own that is closed with the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,l", "dismiss", "Back")]

    def __init__(self, row: Row) -> None:
        super().__init__()
        self._row = row
        self._client: DaemonClient | None = None
        self._has_ended = False

    def compose(self) -> ComposeResult:
        """Make the screen."""
        log = RichLog(wrap=True, markup=False, max_lines=MOST_LOG_LINES)
        log.border_title = plain(f"log of {self._row.key}")
        log.border_subtitle = "new lines appear by themselves"
        yield log
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to read."""
        self.run_worker(self._read, thread=True)

    def on_unmount(self) -> None:
        """End the reading."""
        self._has_ended = True
        if self._client is not None:
            self._client.close()

    def _read(self) -> None:
        try:
            self._client = client = reconnect()
            if client is None:
                raise ClientError("the daemon has exited")
            if self._has_ended:  # while it connected: `on_unmount` has closed nothing
                client.close()
                return
            self._write_pieces(client)
        except ClientError as exc:
            if self.is_attached:
                self.app.call_from_thread(self._write, f"[{exc.message}]")

    def _write_pieces(self, client: DaemonClient) -> None:
        kind, _, name = self._row.key.partition(" ")
        if kind == "request":
            pieces = client.request_log(name, tail=LOG_LINES, follow=True)
        else:
            replica = name if kind == "replica" else None
            name = str(self._row.about["environment"]) if replica else name
            pieces = client.environment_log(name, tail=LOG_LINES, follow=True, replica=replica)
        stream, rest = TextStream(keeps_colours=True), ""
        for piece in pieces:
            *lines, rest = (rest + stream.feed(piece)).split("\n")
            if not self.is_attached:
                return
            if lines:
                self.app.call_from_thread(self._write, "\n".join(lines))
        self.app.call_from_thread(self._write, rest or "[end of the log]")

    def _write(self, text: str) -> None:
        self.query_one(RichLog).write(Text.from_ansi(text))


class TopApp(App[None]):
    """Environments, queue, workers and memory, and keys that change them."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "openenv top"
    CSS = """
    #headline, #memory { height: 1; }
    #lost, #deaths { height: auto; max-height: 5; text-style: bold reverse; display: none; }
    #details { height: auto; max-height: 3; min-height: 1; }
    Panel { height: 2fr; border: none; border-top: solid; scrollbar-size-vertical: 1; }
    #workers { height: 1fr; min-height: 3; }
    Panel:focus { border-top: heavy; border-title-style: reverse; }
    Panel > .datatable--header { background: ansi_default; }
    Panel > .datatable--cursor { text-style: none; }
    Panel:focus > .datatable--cursor { text-style: reverse; }
    RichLog { border-top: solid; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("s", "scale", "Scale"),
        ("r", "restart", "Restart"),
        ("d", "down", "Down"),
        ("c", "cancel", "Cancel"),
        ("l", "logs", "Logs"),
        ("x", "dismiss_deaths", "Seen"),
        ("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),  # Textual's own tells of ctrl+q
    ]

    class Read(Message):
        """What the reader has read."""

        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self.seen = seen

    class Lost(Message):
        """There is no daemon that answers."""

        def __init__(self, problem: ClientError) -> None:
            super().__init__()
            self.problem = problem

    def __init__(self, client: DaemonClient) -> None:
        super().__init__(ansi_color=True)  # the terminal's own colours, or none with NO_COLOR
        self._changes = Changes(client, is_patient=True)
        self._ending = threading.Event()
        self._lost_at: float | None = None
        self._deaths: list[Death] = []
        self._dismissed: set[str] = set()
        self._announced: set[str] = set()

    def compose(self) -> ComposeResult:
        """Make the screen."""
        yield Static(id="headline")
        yield Static(id="memory")
        yield Static(id="lost")
        yield Static(id="deaths")
        yield Panel("Environments", top_view.ENVIRONMENTS)
        yield Panel("Requests", top_view.REQUESTS)
        yield Panel("Workers", top_view.WORKERS)
        yield Static(id="details")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read."""
        self.theme = "ansi-dark"
        self.query_one("#environments").focus()
        self._changes.start()
        self._changes.happened.set()
        self.run_worker(self._read, thread=True)

    def on_unmount(self) -> None:
        """End the threads."""
        self._ending.set()
        self._changes.happened.set()
        self._changes.stop()

    # Reading; in the reader's thread.

    def _read(self) -> None:
        while not self._ending.is_set():
            self._changes.happened.wait(REFRESH_SECONDS)
            self._changes.happened.clear()  # before reading: what changes meanwhile is read next
            self.post_message(self._look())
            self._ending.wait(LEAST_PAUSE_SECONDS)

    def _look(self) -> Read | Lost:
        if (problem := self._changes.problem) is not None:
            return self.Lost(problem)
        client = self._changes.client
        try:
            return self.Read(Seen(client.status(), client.info(), time.time()))
        except ClientError as exc:
            return self.Lost(exc)

    # Showing.

    def on_top_app_read(self, message: Read) -> None:
        """Show what was read."""
        seen = message.seen
        self._lost_at = None
        self.query_one("#lost").display = False
        self._put("#headline", top_view.headline(seen, self.size.width))
        self._put("#memory", top_view.memory_line(seen.info, self.size.width))
        self._panel("environments").show(top_view.environment_rows(seen.status["environments"]))
        self._panel("requests").show(top_view.request_rows(seen.status["requests"], seen.at))
        self._panel("workers").show(top_view.worker_rows(seen.info))
        self._deaths = top_view.deaths(seen.status, seen.at)
        self._show_deaths()
        self._show_details()

    def on_top_app_lost(self, message: Lost) -> None:
        """Say that there is no daemon; what was shown stays."""
        self._lost_at = self._lost_at or time.time()
        since = phrases.duration(time.time() - self._lost_at)
        hint = f"; {message.problem.hint}" if message.problem.hint else ""
        line = self._put("#lost", f"DAEMON LOST for {since}: {message.problem.message}{hint}")
        line.display = True

    def on_data_table_row_highlighted(self) -> None:
        """Show the details of the row that was gone to."""
        self._show_details()

    def on_descendant_focus(self) -> None:
        """Show the details of the table that was gone to."""
        self._show_details()

    def on_data_table_row_selected(self) -> None:
        """Show the log: Enter, or a click."""
        self.action_logs()

    def _show_deaths(self) -> None:
        new = [death for death in self._deaths if death.key not in self._dismissed]
        lines = [death.line for death in new[:DEATHS_SHOWN]]
        if len(new) > DEATHS_SHOWN:
            lines.append(f"and {len(new) - DEATHS_SHOWN} more; x: seen")
        line = self._put("#deaths", "\n".join(lines))
        line.display = bool(new)
        keys = {death.key for death in new}
        if keys - self._announced:
            self.bell()
        self._announced |= keys

    def _show_details(self) -> None:
        focused = self._focused()
        row = focused.selected if focused is not None else None
        self._put("#details", top_view.details(row) if row is not None else "")

    def _put(self, selector: str, text: str) -> Static:
        found = self.screen_stack[0].query_one(selector, Static)
        found.update(Text(text))
        return found

    def _panel(self, name: str) -> Panel:
        return self.screen_stack[0].query_one(f"#{name}", Panel)

    def _focused(self) -> Panel | None:
        focused = self.screen_stack[0].focused
        return focused if isinstance(focused, Panel) else None

    # Keys.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave the keys to a dialog while one is open."""
        return action == "quit" or len(self.screen_stack) == 1 or action not in _ACTIONS

    def action_scale(self) -> None:
        """Ask how many replicas the environment shall have."""
        environment = self._environment()
        if environment is None:
            return
        name = environment["name"]
        has = sum(r["state"] != ReplicaState.DRAINING for r in environment["replicas"])

        def scale(count: int | None) -> None:
            if count is not None:
                payload = {"name": name, "replicas": count}
                self._do(f"scale {name} to {count}", lambda client: client.submit("scale", payload))

        question = f"How many replicas shall {name} have?"
        self.push_screen(AskNumber(question, has), scale)

    def action_restart(self) -> None:
        """Restart the environment, or the replica that is selected."""
        environment, row = self._environment(), self._panel("environments").selected
        if environment is None or row is None:
            return
        payload: dict[str, Any] = {"name": environment["name"]}
        label = f"restart {environment['name']}"
        if row.key.startswith("replica "):
            payload["replica"] = row.about["ordinal"]
            label += f" replica {row.about['ordinal']}"

        def restart(client: DaemonClient) -> object:
            return client.submit("restart", payload)

        if not row.about["sessions"]:
            self._do(label, restart)
            return
        lost = f"{_sessions(row.about)} may go on until the time for draining is over."
        self._ask(f"{label}?\n{lost}", label, restart)

    def action_down(self) -> None:
        """Take the environment down."""
        if (environment := self._environment()) is not None:
            name = environment["name"]
            question = f"Take {name} down?\n{_sessions(environment)} will end with it."
            self._ask(question, f"down {name}", lambda c: c.submit("down", {"name": name}))

    def action_cancel(self) -> None:
        """Cancel the request that is selected."""
        row = self._panel("requests").selected
        if row is None or row.about["state"] in FINAL_STATES:
            self.notify("select a request that waits or runs", severity="warning")
            return
        request_id, label = row.about["id"], row.about["label"]
        question = f"Cancel {label} ({phrases.short_id(request_id)})?\nIts work so far is lost."
        self._ask(question, f"cancel {label}", lambda client: client.cancel(request_id))

    def action_logs(self) -> None:
        """Follow the log of what is selected."""
        focused = self._focused()
        row = focused.selected if focused is not None else None
        if row is not None and row.key.startswith("worker "):
            row = self._request_of(row.about)
        if row is None:
            self.notify("nothing with a log is selected", severity="warning")
        else:
            self.push_screen(Logs(row))

    def action_dismiss_deaths(self) -> None:
        """Take away what has been seen; another death is shown again."""
        self._dismissed |= {death.key for death in self._deaths}
        self._show_deaths()

    def _environment(self) -> dict[str, Any] | None:
        """Return the environment that is selected, itself or by a replica."""
        panel = self._panel("environments")
        row = panel.selected
        name = None if row is None else row.about.get("environment", row.about.get("name"))
        found = [e for e in panel.rows_about("environment") if e["name"] == name]
        if not found:
            self.notify("select an environment", severity="warning")
        return found[0] if found else None

    def _request_of(self, worker: dict[str, Any]) -> Row | None:
        task_id = worker["task_id"]
        return Row(f"request {task_id}", worker, ()) if task_id else None

    def _ask(self, question: str, label: str, call: Callable[[DaemonClient], object]) -> None:
        def answered(is_wanted: bool | None) -> None:
            if is_wanted:
                self._do(label, call)

        self.push_screen(Confirm(question), answered)

    def _do(self, label: str, call: Callable[[DaemonClient], object]) -> None:
        """Have a thread call the daemon, and say how that went."""

        def run() -> None:
            try:
                call(self._changes.client)
            except ClientError as exc:
                problem = f"{label}: {exc.message}" + (f"\n{exc.hint}" if exc.hint else "")
                self.call_from_thread(self.notify, problem, severity="error", markup=False)
            else:
                self.call_from_thread(self.notify, f"{label}: asked", markup=False)

        self.run_worker(run, thread=True)


_ACTIONS = frozenset({"scale", "restart", "down", "cancel", "logs", "dismiss_deaths"})


def _sessions(about: dict[str, Any]) -> str:
    return phrases.plural(about["sessions"], "session")
