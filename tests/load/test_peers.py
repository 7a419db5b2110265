# SPDX-License-Identifier: Apache-2.0
"""A peer is started as a user would, reported where it cannot be, and leaves nothing behind."""

from __future__ import annotations

import sys

import pytest


def test_a_peer_that_cannot_start_is_reported_with_its_last_lines() -> None:
    from load_tests.peers.skypilot_peer import Kind, need, started

    kind = Kind("mute", lambda _port, _home: ["/bin/sh", "-c", "echo no such luck; exit 3"])
    with (
        started(kind) as peer,
        pytest.raises(SystemExit, match="mute did not start:\nno such luck"),
    ):
        need(peer)


def test_a_peer_whose_port_is_taken_gets_another_and_leaves_no_process() -> None:
    from load_tests.peers.skypilot_peer import Kind, need, session_of, started

    script = 'test -e tried || { touch tried; echo port $0 is already in use; exit 1; }; exec "$@"'
    serve = "import http.server as h; import sys; C = h.BaseHTTPRequestHandler\n"
    serve += (
        "C.do_GET = lambda s: (s.send_response(200), s.end_headers(), s.wfile.write(b'healthy'))\n"
    )
    serve += "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), C).serve_forever()"

    def command(port: int, _home: object) -> list[str]:
        return ["/bin/sh", "-c", script, str(port), sys.executable, "-c", serve, str(port)]

    with started(Kind("second time lucky", command)) as peer:
        assert need(peer).is_healthy
        assert peer.look()[1] == 1
    assert session_of(peer.process.pid) == []


def test_a_ratio_over_one_is_for_ours() -> None:
    from load_tests.shared.report import Report

    report = Report("any")
    report.beside("waits (aim: 3)", "ms", [2.0], {"peer": [6.0]})
    report.beside("rate", "req/s", [20.0], {"peer": [5.0]}, more_is_better=True)
    report.beside("kills", "", [0.0], {"peer": [2.0]})
    assert [(m.name, m.values) for m in report.measures] == [
        ("waits (aim: 3)", [2.0]),
        ("  waits: peer", [6.0]),
        ("    waits: peer / ours", [3.0]),
        ("rate", [20.0]),
        ("  rate: peer", [5.0]),
        ("    rate: ours / peer", [4.0]),
        ("kills", [0.0]),
        ("  kills: peer", [2.0]),
    ]
