# SPDX-License-Identifier: Apache-2.0
"""The examples of `docs/rollouts.md` do what they say."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from openenvd.rollouts.episodes import StepSink
from openenvd.rollouts.folder.output import Output
from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.sending.receivers import SocketReceiver
from openenvd.rollouts.stages.interleave import TokenStep, interleave

from .made import episode, finish, image, step

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rollouts.md"


def example(words: str) -> dict[str, Any]:
    """What the one example with these words leaves behind."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [block] = [block for block in blocks if words in block]
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    output = Output(Path("out"))
    output.put_step("a", 0, step(arrays={"image": image(1)}))
    output.finish(episode("a", reward=2.5))
    output.close()
    example("open_rollouts")
    assert capsys.readouterr().out == "a 2.5\n"


async def test_collecting_in_groups(tmp_path: Path) -> None:
    class Collector:
        async def collect(self, numbers: range, sink: StepSink) -> None:
            for number in numbers:
                await sink.finish(episode(f"{number:06}", reward=float(number)))

    await example("GroupSink")["collect"](Collector(), tmp_path)
    rollouts = open_rollouts(tmp_path)
    assert len(rollouts) == 256
    assert rollouts.episode("000000").row["advantage"] == -4.0


async def test_sending(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = example("SocketSender")
    trained = asyncio.Queue[Any]()
    names["train"] = trained.put_nowait
    samples = interleave([TokenStep([1, 2], [3])])
    async with await SocketReceiver.listen(("127.0.0.1", 0)) as free:
        port = free.port
    receiving = asyncio.create_task(names["receive"](port))
    sender = names["SocketSender"]
    names["SocketSender"] = lambda address: sender(("127.0.0.1", address[1]))
    sending = asyncio.create_task(names["send"](samples, port))
    assert await trained.get() == samples
    await sending
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)


def test_finished_rollouts_are_found_by_their_steps(tmp_path: Path) -> None:
    """`data_files` is what `load_dataset` is given."""
    output = Output(tmp_path)
    finish(output, "a")
    output.close()
    assert open_rollouts(tmp_path).data_files("steps") == [str(tmp_path / "steps-00000.jsonl")]
