# SPDX-License-Identifier: Apache-2.0
"""`scale` and `restart`: other replicas for an environment that runs, at the same address.

    scale up     start ─▶ all ready ─▶ keep them; the sessions are shared out anew
    scale down   share out ─▶ drain the youngest; the request does not wait for their sessions
    restart      for each: start one like it ─▶ ready ─▶ keep it ─▶ drain the old one, and wait;
                 those that are to end `together` in one go

Whatever fails, the replicas that the environment had serve on. What was started and not kept is
stopped: here, at the next attempt, or by the daemon (`environments/scaling.py`). A restart that is
killed when it has kept one, and not drained the other, does it at its next attempt, which leaves
alone what was kept; without one, the daemon does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from ...environments import run_files, scaling
from ...environments.engines.provider import StartedReplica
from ...environments.engines.providers import provider_named
from ...environments.gateway import process as gateway_process
from ...environments.replica_policy import share_sessions
from ...environments.run_files import RunFile
from ...schema.errors import InvalidSpec, NotReady, NotRunning
from ...schema.layout import Layout
from ...schema.operation_options import DrainOptions
from ...schema.spec import MAX_REPLICAS, sleep_seconds_of
from ...system.text.units import MB
from . import base
from .progress import ReplicasAwaited, SessionsLeft, plural

READY_SECONDS = 600.0
GATEWAY_SECONDS = 30.0  # for it to reach what was added
STOP_SECONDS = 15.0  # for what has not ended by itself, after its time


class ChangePayload(base.payload_of(DrainOptions)):  # type: ignore[misc]  # made at run time
    """The environment, and how its replicas are taken away."""

    name: str = Field(min_length=1, description="The environment's name.")


class RestartPayload(ChangePayload):
    """The environment, and which of its replicas are replaced."""

    replica: int | None = Field(
        None, ge=0, description="The number of the one replica to restart; by default all."
    )
    together: list[int] = Field(
        [],
        max_length=MAX_REPLICAS,
        description="Numbers of replicas to restart in one go, as they end by themselves soon.",
    )
    reason: str | None = Field(
        None, max_length=base.MAX_TEXT, description="Why, for the history; the daemon says it."
    )


class ScalePayload(ChangePayload):
    """The environment, and how many replicas it is to have."""

    replicas: int = Field(description="How many replicas it is to have.")
    reason: str | None = Field(
        None, max_length=base.MAX_TEXT, description="Why, for the history; autoscaling says it."
    )

    @field_validator("replicas")
    @classmethod
    def _possible(cls, value: int) -> int:
        if value < 1:
            raise ValueError(f"{value} replicas would serve nobody; `openenv down` stops it")
        if value > MAX_REPLICAS:
            raise ValueError(
                f"{value} replicas are more than the {MAX_REPLICAS} of one environment"
            )
        return value


class Scale(base.Operation):
    """Gives one environment more replicas, or fewer."""

    name = "scale"
    summary = "Change how many replicas an environment has."
    schedule = "LONG"
    leaves_bytes = 40 * MB
    Payload = ScalePayload

    @staticmethod
    def run(payload: ScalePayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"environment", "replicas": N, "started": [ids], "draining": [ids], "sessions": N}`.

        The replicas of the `environment` are those that were started; the sessions, those of the
        draining ones.

        Raises:
            EnvironmentsError
        """
        replicas = _Replicas(payload.name, context)
        staying = replicas.found()
        spec = staying[0].data["spec"]
        _check_range(payload, spec)
        if payload.reason is not None:
            base.say(f"{payload.name}: {payload.reason}")
        most = spec.get("max_replicas")
        shares = share_sessions(spec.get("max_sessions"), payload.replicas, most)
        more = shares[len(staying) :]
        started = replicas.add(staying[0], more, payload.replicas) if more else []
        scaling.share_out(staying[: payload.replicas], shares[: len(staying)], payload.replicas)
        surplus = staying[payload.replicas :]
        sessions = sum(run_files.sessions_of(surplus).values())
        for run_file in surplus:
            replicas.drain(run_file, payload.drain_timeout_seconds)
        return {
            "environment": {
                "name": payload.name,
                "replicas": [replica.to_json() for replica in started],
            },
            "replicas": payload.replicas,
            "started": [replica.id for replica in started],
            "draining": [run_file.replica_id for run_file in surplus],
            "sessions": sessions,
        }


class Restart(base.Operation):
    """Replaces the replicas of one environment, one after another."""

    name = "restart"
    summary = "Replace an environment's replicas, without ending a session."
    schedule = "LONG"
    leaves_bytes = 40 * MB
    Payload = RestartPayload

    @staticmethod
    def run(payload: RestartPayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"environment": {"name"}, "restarted": [{"old", "new"}]}`.

        Raises:
            EnvironmentsError
        """
        replicas = _Replicas(payload.name, context)
        seconds = payload.drain_timeout_seconds
        restarted = replicas.finish_earlier(seconds)
        staying = replicas.found()
        if payload.reason is not None:
            base.say(f"{payload.name}: {payload.reason}")
        for batch in _chosen(staying, payload, {each["new"] for each in restarted}):
            shares = [old.max_sessions for old in batch]
            in_place_of = [
                {
                    "replica": old.replica_id,
                    "request_id": context.request_id,
                    "drain_timeout_seconds": seconds,
                }
                for old in batch
            ]
            started = replicas.add(batch[0], shares, len(staying), in_place_of)
            replicas.end(batch, seconds)
            for old, new in zip(batch, started, strict=True):
                restarted.append({"old": old.replica_id, "new": new.id})
        return {
            "environment": {"name": payload.name},
            "restarted": restarted,
        }


def _check_range(payload: ScalePayload, spec: dict[str, Any]) -> None:
    least, most = spec.get("min_replicas") or 1, spec.get("max_replicas")
    if most is not None and not least <= payload.replicas <= most:
        raise InvalidSpec(
            f"{payload.name} scales itself between {least} and {most} replicas, and"
            f" {payload.replicas} is not among these",
            "launch it with another --min or --max",
        )
    if most is None and payload.replicas > 1 and sleep_seconds_of(spec) is not None:
        base.say(f"{payload.name} does not sleep while it has several replicas")


class _Replicas:
    """The replicas of one environment, while a request changes them."""

    def __init__(self, name: str, context: base.OperationContext) -> None:
        self._name = name
        self._context = context
        self._layout = Layout(context.home)
        self._runs = self._layout.runs
        if left := scaling.stop_added_by(self._runs, name, context.request_id):
            base.say(f"stopped what an earlier attempt had started: {', '.join(left)}")

    def found(self) -> list[RunFile]:
        """Those that it is to have, the oldest first."""
        staying = scaling.replicas_of(self._runs, self._name)
        if not staying:
            raise NotRunning(f"{self._name} has no replicas", "launch it again")
        return staying

    def add(
        self,
        like: RunFile,
        shares: Sequence[int | None],
        replicas: int,
        in_place_of: Sequence[dict[str, Any]] = (),
    ) -> list[StartedReplica]:
        """Start one for each share, and keep them once all are ready."""
        provider = provider_named(like.data.get("provider") or "local", self._context.home)
        awaited = ReplicasAwaited(self._context, len(shares))
        awaited.report(f"{plural(len(shares), 'replica')} starting")
        added = provider.add(
            like,
            shares,
            replicas=replicas,
            added_by=self._context.request_id,
            on_started=lambda replica: base.say(f"replica {replica.ordinal} is starting"),
        )
        seconds = float(like.data["spec"].get("ready_timeout_seconds") or READY_SECONDS)
        try:
            ready = added.wait_until_ready(seconds, awaited.on_ready, base.say, awaited.on_lasting)
            scaling.keep((Path(str(replica.run_dir)) for replica in ready), in_place_of)
        except BaseException:  # cancelled, too
            added.stop()
            raise
        added.release()
        self._hand_over(ready)
        return ready

    def finish_earlier(self, seconds: float) -> list[dict[str, str]]:
        """End what an earlier attempt has put others in place of; which, and which others."""
        found = run_files.of_environment(self._runs, self._name)
        replaced = {
            run_file.replica_id: run_file.data.get("in_place_of") or {} for run_file in found
        }
        new = [
            run_file
            for run_file in found
            if replaced[run_file.replica_id].get("request_id") == self._context.request_id
        ]
        if not new:
            return []
        self._hand_over([StartedReplica(r.replica_id, r.ordinal, str(r.run_dir)) for r in new])
        pairs = [
            {"old": replaced[run_file.replica_id]["replica"], "new": run_file.replica_id}
            for run_file in new
        ]
        ending = {pair["old"] for pair in pairs}
        self.end([old for old in self.found() if old.replica_id in ending], seconds)
        return pairs

    def _hand_over(self, ready: list[StartedReplica]) -> None:
        """Have the daemon watch replicas from now on, and the gateway reach them.

        Envoy, where there is one, is waited for for a while: then others go.
        """
        for replica in ready:
            self._context.progress({"replica": replica.to_json()})
        found = [run_files.read(Path(str(replica.run_dir))) for replica in ready]
        wanted = [run_file for run_file in found if run_file is not None and run_file.is_at_gateway]
        gateway = gateway_process.read_gateway(self._layout) if wanted else None
        if gateway is not None:
            addresses = ["{}:{}".format(*run_files.endpoint_of(each)) for each in wanted]
            with contextlib.suppress(NotReady):
                gateway_process.wait_until_serving(gateway, self._name, addresses, GATEWAY_SECONDS)

    def drain(self, run_file: RunFile, timeout_seconds: float) -> None:
        """Take one away, which ends with its last session."""
        base.say(f"draining replica {run_file.ordinal}: its sessions have {timeout_seconds:g} s")
        scaling.drain(run_file, timeout_seconds)

    def end(self, replaced: Sequence[RunFile], seconds: float) -> None:
        """Take away those that others are in place of, and wait until they have ended."""
        left = SessionsLeft(self._context, run_files.sessions_of(replaced), seconds)
        for old in replaced:
            self.drain(old, seconds)
        scaling.wait_until_gone(replaced, seconds + STOP_SECONDS, left.note)


def _chosen(
    replicas: list[RunFile], payload: RestartPayload, kept: set[str]
) -> list[list[RunFile]]:
    """Return the replicas to restart, those of a list in one go; none that was `kept`, by id."""
    staying = [run_file for run_file in replicas if run_file.replica_id not in kept]
    if payload.together:  # some may have ended meanwhile
        found = [run_file for run_file in staying if run_file.ordinal in payload.together]
        return [found] if found else []
    if payload.replica is None:
        return [[run_file] for run_file in staying]
    if kept:  # in place of that one
        return []
    chosen = [run_file for run_file in staying if run_file.ordinal == payload.replica]
    if not chosen:
        numbers = ", ".join(str(number) for number in sorted(r.ordinal for r in staying))
        raise NotRunning(
            f"{payload.name} has no replica {payload.replica}", f"its replicas are {numbers}"
        )
    return [chosen]
