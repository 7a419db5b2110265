# SPDX-License-Identifier: Apache-2.0
"""A failure as lines of text, the same in `status`, `logs` and the waiting command.

✗ launch trial  FAILED  out of memory
  Worker long-3 (pid 41233) was killed for using too much memory at 251 MB; …
  Try: openenv retry 7f3a91c2b04d5e68 --memory 512M
  Log: openenv logs 7f3a91c2
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

from ...client.errors import ApiRefused, ClientError
from ...schema.states import EnvironmentState, ErrorKind, ReplicaState, RequestState
from ...system.text.json_lines import Json
from ...system.text.safe_text import plain
from ...system.text.units import MB, plural
from . import phrases
from .output import bad, faint

_WORDS = {
    ErrorKind.OPERATION_ERROR: "",
    ErrorKind.OOM_KILLED: "out of memory",
    ErrorKind.WORKER_LOST: "worker lost",
    ErrorKind.TIMED_OUT: "timed out",
    ErrorKind.INVALID: "cannot work as asked",
}
_EXITED = {
    "oom_killed": "killed for memory",
    "signaled": "killed by a signal",
    "exited": "exited",
    "timed_out": "stopped at a time limit",
    "lost": "ended from outside",
}
_MAX_EXITS = 2  # shown of each replica for lack of memory, and for other causes
_COMMANDS = ("openenv ", "pip ", "uv pip ", "uv tool ", "uvx ")
_PLAIN_WORD = re.compile(r"[a-z]+[\s,;]")
_SETTLED = (ReplicaState.ASLEEP, ReplicaState.DRAINING, ReplicaState.STOPPED)


def request_failure(request: Json, *, shown: Iterable[str] = ()) -> list[str]:
    """Return the lines about a request that failed or was cancelled.

    `shown` has log lines that the user has just seen: a log tail among them is not repeated.
    """
    error = request.get("error")
    if request["state"] == RequestState.CANCELLED and error is None:
        return [f"{bad('✗')} {plain(request['label'])}  {bad('CANCELLED')}"]
    log = f"Log: openenv logs {phrases.short_id(request['id'])}"
    return [*_block(request["label"], request["state"], error or {}, shown), f"  {log}"]


def environment_failure(environment: Json) -> list[str]:
    """Return the lines about an environment that failed, or that has unhealthy replicas."""
    lines: list[str] = []
    name = environment["name"]
    if environment["state"] == EnvironmentState.FAILED:
        error = environment.get("error") or {}
        lines += [*_block(name, environment["state"], error), f"  Log: openenv logs {name}"]
    for replica in environment["replicas"]:
        lines += replica_faults(name, replica)
    return lines


def replica_faults(name: str, replica: Json, *, is_brief: bool = False) -> Iterator[str]:
    """Describe a replica's faults: its message, abandoned steps, programs left, last exits."""
    where, now = f"  {name} replica {replica['ordinal']}:", time.time()
    if replica.get("message") and (replica["state"] not in _SETTLED or replica.get("restarts")):
        yield f"{where} {plain(replica['message'])}"
    for one in replica.get("abandoned") or ():  # steps that run although their sessions have ended
        calls = plural(one["count"], "abandoned call")
        ran = phrases.duration(now - one["since"])
        yield f"{where} shard {one['shard']}: {calls}, running for {ran}"
    if left := replica.get("left"):
        programs = (f"{plain(p['name'])} (pid {p['pid']}, {p['bytes'] / MB:.0f} MB)" for p in left)
        them = "it" if len(left) == 1 else "them"
        what = f"ended sessions have left {', '.join(programs)} behind"
        yield f"{where} {what}; openenv restart {name} ends {them}"
    if replica["state"] == ReplicaState.READY:
        yield from exit_lines(where, replica, now, is_brief=is_brief)


def exit_lines(where: str, replica: Json, now: float, *, is_brief: bool = False) -> Iterator[str]:
    """Describe the latest process exits of a replica or of the gateway, and count all by kind.

    In brief that is one line, of the last exit.
    """
    exits: list[Json] = (replica.get("exits") or [])[: 1 if is_brief else None]
    for_memory = [one for one in exits if (one.get("reason") or {}).get("kind") == "oom_killed"]
    others = [one for one in exits if one not in for_memory]
    shown = for_memory[:_MAX_EXITS] + others[:_MAX_EXITS]
    kinds = replica.get("exit_kinds") or {}
    counts = ", ".join(f"{count} {_EXITED.get(kind, kind)}" for kind, count in kinds.items())
    so_far = f"so far {counts}" if sum(kinds.values()) > len(shown) else ""
    for one in shown:
        ago = phrases.duration(now - (one.get("at") or now))
        more = f"; {so_far}" if is_brief and so_far else ""
        yield f"{where} {ago} ago {plain(one['message'])}{more}"
        if one.get("hint") and not is_brief:
            yield f"    Try: {plain(one['hint'])}"
    if so_far and not (is_brief and shown):
        yield f"{where} {so_far}"


def error_lines(error: ClientError) -> list[str]:
    """Return the lines about an error that ended the command: what happened, what to do next."""
    lines = [f"{bad('error:')} {plain(error.message)}"]
    if error.hint and not error.hint.startswith("GET "):  # a hint for programs
        lines.append(f"  {plain(error.hint)}")
    if isinstance(error, ApiRefused):
        lines += [f"  {plain(str(match))}" for match in error.details.get("matches") or []]
    return lines


def _block(subject: str, state: str, error: Json, shown: Iterable[str] = ()) -> list[str]:
    word = _WORDS.get(error.get("kind", ""), "")
    subject, message = plain(subject), plain(error.get("message") or "no details are known")
    lines = [f"{bad('✗')} {subject}  {bad(state)}  {word}".rstrip()]
    lines += [f"  {line}" for line in _sentence(message, subject).splitlines()]
    lines += [f"  {line}" for line in _evidence(error, message)]
    tail = [plain(line) for line in error.get("log_tail") or []]
    if tail and tail[-1].rstrip() not in {plain(line).rstrip() for line in shown}:
        lines += [faint(f"  │ {line}") for line in tail]
    if hint := plain(error.get("hint") or ""):
        is_command = hint.startswith(_COMMANDS)
        lines.append(f"  Try: {hint}" if is_command else f"  {_sentence(hint, subject)}")
    return lines


def _sentence(text: str, subject: str) -> str:
    """Capitalize the text, unless it begins with a path, an address or the subject's name."""
    first = text.partition(" ")[0]
    if first in subject.split()[-1:] or not _PLAIN_WORD.match(text):
        return text
    return text[:1].upper() + text[1:]


def _evidence(error: Json, message: str) -> list[str]:
    """Return evidence that the message lacks: the killed process, and how that was detected."""
    exit_reason = error.get("evidence") or {}
    lines = []
    if (name := exit_reason.get("victim_name")) and str(name) not in message:
        lines.append(
            f"The killed process was {plain(str(name))} (pid {exit_reason.get('victim_pid')})."
        )
    if (sign := exit_reason.get("evidence")) and str(sign) not in message:
        lines.append(f"Evidence: {plain(str(sign))}.")
    return lines
