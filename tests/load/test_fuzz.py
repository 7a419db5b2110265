# SPDX-License-Identifier: Apache-2.0
"""What holds of any bytes that an environment gets.

OPENENVD_FUZZ_EXAMPLES=10000 pytest --timeout 0 tests/load/test_fuzz.py      for hours
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from websockets.utils import apply_mask

from openenvd.env_host.websocket import frames
from openenvd.schema.protocol import HostConfig

from ..env_host.hosts import Host

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
    from load_tests.shared import ws_fuzzing as fuzzing

    if unmasked_by == "Python":
        monkeypatch.setattr(frames, "apply_mask", apply_mask)
    fuzzing.try_examples(fuzzing.check_frames, fuzzing.FRAMES, 5 * EXAMPLES)


def test_a_handshake_that_we_take_is_one_that_websockets_takes() -> None:
    from load_tests.shared import ws_fuzzing as fuzzing

    fuzzing.try_examples(fuzzing.check_head, fuzzing.HEADS, 5 * EXAMPLES)


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
def test_every_message_is_answered_or_its_connection_closed(host: Host, path: str) -> None:
    from load_tests.shared import ws_fuzzing as fuzzing

    check = fuzzing.conversation_check(host.port, path)
    fuzzing.try_examples(check, fuzzing.CONVERSATIONS, EXAMPLES)


def test_whatever_is_sent_the_connection_ends_and_others_are_served(host: Host) -> None:
    from load_tests.shared import ws_fuzzing as fuzzing

    fuzzing.try_examples(fuzzing.stream_check(host.port), fuzzing.STREAMS, EXAMPLES)
