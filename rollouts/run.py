# SPDX-License-Identifier: Apache-2.0
"""Runs a rollout into a folder, or the rest of one that was interrupted.

    rollout.json: the same? ─▶ writer: which episodes exist? ─▶ collector: the others ─▶ close
                                                                     └─▶ stages, if any

Everything about an episode follows from its number, so a missing one can be played at any time.
An episode whose retries all failed is reported but not written, so the next rollout into the folder
plays it again; `keep_failed` writes the part that was played. For groups see `stages.sinks`.

Half of `buffer_bytes` is for the data of running episodes, half for data waiting to be written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

from ..system.process.loop_lag import LagSnapshot
from ..system.text.safe_text import hide_credentials
from ..system.text.units import MB, plural
from .collector import RolloutCollector
from .episode_runner import Rules
from .episodes import EpisodeStatus, FailureReason, ProgressStats, episode_id
from .errors import OtherRollout, OutputUnwritable, of_os_error
from .folder.readers import has_rollouts
from .folder.writer import RolloutWriter
from .session_pool import Followed
from .stages.named_parts import CHAT_PREFIX, FAILED, Stages, check_group, policy_named
from .stages.sinks import GroupSink, Say

RECORD = "rollout.json"
REPORT_SECONDS = 1.0
MAX_REPLAYS = 3  # of episodes that are damaged while the rollout runs
DEFAULT_BUFFER_BYTES = 256 * MB
_ISOLATE = "where a step ends its process, openenv launch --isolate keeps the other sessions"
_CHAT = (
    "check that the policy's endpoint answers, and check OPENAI_API_KEY and OPENAI_MODEL; the "
    "request's log says of each episode why it failed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Rules):
    """The configuration of a rollout. None means no limit."""

    environments: Mapping[str, str]  # addresses, by the user's names
    policy: str
    folder: Path
    episodes: int
    concurrency: int = 64
    retries: int = 2
    stages: Stages = field(default_factory=Stages)
    keep_failed: bool = False
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    followed: Mapping[str, Followed] = field(default_factory=dict)  # by address

    def __post_init__(self) -> None:
        check_group(self.stages.size, self.episodes)

    @property
    def unit(self) -> str:
        """The unit of `episodes`: `episode`, or `tree` if each of them branches."""
        return "episode" if self.tree is None else "tree"

    def record(self) -> dict[str, Any]:
        """Return the settings that must be unchanged when a rollout is continued."""
        return {
            "environments": list(self.environments),
            "policy": hide_credentials(self.policy),
            "seed": self.seed,
            "max_steps": self.max_steps,
            "reset": dict(self.reset or {}),
            "tree": self.tree,
            **self.stages.record(),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The progress of a run."""

    unit: str  # of the next two: `episode` or `tree`
    wanted: int
    earlier: int  # those that existed already
    stats: ProgressStats
    lag: LagSnapshot

    def message(self) -> str:
        """Return the text of the progress line."""
        stats = self.stats
        parts = [
            f"{self.earlier + stats.trees}/{self.wanted} {self.unit}s",
            *([plural(stats.episodes, "episode")] if self.unit == "tree" else []),
            *([f"{stats.steps_per_second:,.0f} steps/s"] if stats.steps else []),
        ]
        if (mean := stats.mean_reward(EpisodeStatus.DONE)) is not None:
            parts.append(f"mean reward {mean:.3g}")
        if truncated := stats.finished[EpisodeStatus.TRUNCATED]:
            mean = stats.mean_reward(EpisodeStatus.TRUNCATED)
            reward_note = "" if mean is None else f" (mean reward {mean:.3g})"
            parts.append(f"{truncated} truncated{reward_note}")
        counts = {
            "rewards are not numbers": stats.odd_rewards.total(),
            "failed": stats.finished[EpisodeStatus.FAILED],
            "filtered": stats.filtered.total(),
            "tried again": stats.retried.total(),
        }
        parts += [f"{count} {what}" for what, count in counts.items() if count]
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "unit": self.unit,
            "wanted": self.wanted,
            "earlier": self.earlier,
            "there": self.earlier + self.stats.written,
            **self.stats.to_json(),
            "lag": asdict(self.lag),
        }


async def roll_out(
    config: RunConfig,
    on_report: Callable[[Report], None],
    say: Say = lambda _: None,
    *,
    report_seconds: float = REPORT_SECONDS,
    tracer: Any = None,
) -> dict[str, Any]:
    """Run a rollout into a folder, or the rest of one; `tracer` is `RolloutCollector`'s.

    `on_report` is called with each report, on another thread, and may block; `say` with each line
    for the log.

    Returns:
        The last report as JSON values, with the folder.

    Raises `RolloutError`: The run as a whole failed; finished episodes are kept.
    """
    addresses = list(config.environments.values())
    collector = RolloutCollector(
        addresses,
        await policy_named(config.policy, addresses[0]),
        concurrency=min(config.concurrency, config.episodes),
        retries=config.retries,
        group=config.stages.size,
        buffer_bytes=config.buffer_bytes // 2,
        followed=config.followed,
        tracer=tracer,
        **{rule.name: getattr(config, rule.name) for rule in fields(Rules)},
    )
    stats = collector.stats
    advantages, filters = await asyncio.to_thread(config.stages.functions)
    damaged = list[str]()

    def tell(lines: list[str]) -> None:
        damaged.extend(lines)
        for line in lines:
            say(line)

    tell(await asyncio.to_thread(claim_folder, config))

    def report() -> Report:
        return Report(config.unit, config.episodes, earlier, stats, collector.lag.snapshot())

    writing = await RolloutWriter.open(
        config.folder, buffer_bytes=config.buffer_bytes // 2, group=config.stages.size
    )
    async with writing as writer:

        async def lost_numbers() -> list[int]:
            tell(await asyncio.to_thread(claim_folder, config))
            lost, found = await writer.check()
            tell(found)
            return [number for number in range(config.episodes) if episode_id(number) in lost]

        await lost_numbers()  # report the damage that `RolloutWriter.open` found
        there = writer.finished_episode_ids()
        numbers = [n for n in range(config.episodes) if episode_id(n) not in there]
        earlier = config.episodes - len(numbers)
        if earlier:
            say(f"{earlier} of {plural(config.episodes, config.unit)} are there already")
        keeps_failed = config.keep_failed or FAILED in config.stages.filters
        sink = GroupSink(
            writer,
            config.stages.size,
            filters=filters,
            advantages=advantages,
            counts=stats,
            say=say,
            hints=_hints(config, keeps_failed=keeps_failed),
            keeps_failed=keeps_failed,
        )
        try:
            async with _reporting(report, on_report, report_seconds):
                for _ in range(1 + MAX_REPLAYS):
                    await collector.collect(numbers, sink)
                    numbers = await lost_numbers()
                    stats.written -= len(numbers)
                    stats.is_replay = True
                    if not numbers:
                        break
                    say(f"{config.unit}s to be played again: {len(numbers)}")
        finally:
            await asyncio.to_thread(sink.stop)
    sink.raise_if_all_failed(earlier)
    return {
        **report().to_json(),
        "out": str(config.folder),
        "kept_failed": keeps_failed,
        "max_steps": config.max_steps,
        "damaged": damaged,
    }


def _hints(config: RunConfig, *, keeps_failed: bool) -> dict[FailureReason, str]:
    """Return hints that are better than the request's log, by the reason of a failure."""
    found = {}
    if config.policy.startswith(CHAT_PREFIX):
        found = dict.fromkeys((FailureReason.POLICY_ERROR, FailureReason.POLICY_TIMED_OUT), _CHAT)
    names = list(config.environments)
    if known := [name for name in names if "://" not in name]:  # that the daemon runs
        command = f"openenv status {known[0]}" if len(names) == 1 else "openenv status"
        again = "" if keeps_failed else "; run the same rollout again to play the missing episodes"
        found[FailureReason.NOT_CONNECTED] = lost = f"{command} tells what happened{again}"
        found[FailureReason.CONNECTION_LOST] = f"{lost}; {_ISOLATE}"
    return found


def claim_folder(config: RunConfig) -> list[str]:
    """Record the rollout's settings in the folder, or compare them with the recorded ones.

    Returns:
        Messages about a record that was damaged or removed. The folder then counts as one of the
        same rollout.

    Raises:
        OtherRollout: The folder holds a different rollout.
        OutputUnwritable, OutputFull: The folder's path is a file, or the file system refused.
    """
    path, now = config.folder / RECORD, config.record()
    try:
        if config.folder.exists() and not config.folder.is_dir():
            raise OutputUnwritable(f"{config.folder} is a file", "--out takes a folder, new or not")
        try:
            config.folder.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as exc:  # its file system makes no folders, as `/proc`
            text = f"the folder {config.folder} cannot be made: {exc.strerror}"
            raise OutputUnwritable(text, "write to another folder") from exc
        if path.exists():
            try:
                before = dict(orjson.loads(path.read_bytes()))
                if not {"environments", "policy", "seed"} <= before.keys():
                    raise ValueError
            except (ValueError, TypeError, IsADirectoryError):
                path.replace(aside := path.with_suffix(".damaged"))
                claim_folder(config)
                return [f"{path} was cut or changed; it is {aside.name} now"]
            for key, value in now.items():
                if (found := hide_credentials(before.get(key))) != value:
                    raise OtherRollout(
                        f"{config.folder} holds a rollout with a different {key}: {found!r}, not "
                        f"{value!r}",
                        "write to another folder, or repeat the settings to continue that rollout",
                    )
            return []
        partial = path.with_suffix(".partial")
        partial.write_bytes(orjson.dumps(now, option=orjson.OPT_INDENT_2))
        partial.replace(path)
        is_new = not has_rollouts(config.folder)
        return [] if is_new else [f"{RECORD} was removed, and is there again"]
    except OSError as exc:
        raise of_os_error(exc, path) from exc


@asynccontextmanager
async def _reporting(
    report: Callable[[], Report], on_report: Callable[[Report], None], seconds: float
) -> AsyncIterator[None]:
    async def each_second() -> None:
        while True:
            await asyncio.sleep(seconds)
            await asyncio.to_thread(on_report, report())

    reporting = asyncio.create_task(each_second(), name="reporting")
    try:
        yield
    finally:
        reporting.cancel()
        await asyncio.wait([reporting])
    await asyncio.to_thread(on_report, report())  # even if the rollout was shorter than `seconds`
