# SPDX-License-Identifier: Apache-2.0
"""What holds of any bytes that an environment gets.

OPENENVD_FUZZ_EXAMPLES=10000 pytest --timeout 0 tests/env_host/websocket/test_fuzz.py    for hours
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest
from websockets.utils import apply_mask

from openenvd.env_host.websocket import frames
from openenvd.schema.protocol import HostConfig

from ..hosts import Host
from . import fuzzing

BENCHMARK = "openenvd.env_host.bundled.benchmark.environment:BenchmarkEnvironment"
EXAMPLES = int(os.environ.get("OPENENVD_FUZZ_EXAMPLES", "12"))


@pytest.fixture(scope="module", params=[False, True], ids=["shards", "isolated"])
def host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    config = HostConfig("benchmark", env_class=BENCHMARK, isolate=request.param)
    host = Host(config, tmp_path_factory.mktemp("fuzz"))
    host.ready()
    yield host
    assert host.stop() == 0
    host.close()
    log = host.log.read_text()
    assert "unexpected" not in log, log


@pytest.mark.parametrize("unmasked_by", ["C", "Python"])
def test_frames_are_understood_as_websockets_understands_them(
    unmasked_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unmasked_by == "Python":
        monkeypatch.setattr(frames, "apply_mask", apply_mask)
    fuzzing.try_examples(fuzzing.check_frames, 5 * EXAMPLES, fuzzing.frame_lists, fuzzing.cuts)


def test_a_handshake_that_we_take_is_one_that_websockets_takes() -> None:
    fuzzing.try_examples(fuzzing.check_head, 5 * EXAMPLES, fuzzing.heads())


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
def test_every_message_is_answered_or_its_connection_closed(host: Host, path: str) -> None:
    check = partial(fuzzing.check_conversation, host, path)
    fuzzing.try_examples(check, EXAMPLES, fuzzing.conversations, fuzzing.cuts)


def test_whatever_is_sent_the_connection_ends_and_others_are_served(host: Host) -> None:
    fuzzing.try_examples(partial(fuzzing.check_stream, host), EXAMPLES, fuzzing.streams)
