# SPDX-License-Identifier: Apache-2.0
"""Grids and addresses as people write them on the command line of `load_tests.scaling`."""

from __future__ import annotations

import pytest

from openenvd.bench.errors import InvalidPlan


@pytest.mark.parametrize("text", ["", " , ", "1,x", "one"])
def test_a_grid_without_numbers_is_refused(text: str) -> None:
    from load_tests.shared.scaling_arguments import parse_counts

    with pytest.raises(InvalidPlan, match="requests"):
        parse_counts("requests", text)


def test_sessions_come_whole() -> None:
    from load_tests.shared.scaling_arguments import parse_counts

    assert parse_counts("requests", "32, 128,") == (32, 128)
    with pytest.raises(InvalidPlan, match="parts of one"):
        parse_counts("requests", "1.5")


def test_waits_may_be_parts_of_seconds() -> None:
    from load_tests.shared.scaling_arguments import parse_grid

    assert parse_grid("wait", "0.5,1") == (0.5, 1.0)


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1", 8000, ""),
        ("localhost:8000/", "localhost", 8000, ""),
        ("ws://host:9/ws", "host", 9, ""),
        ("http://host/env/one/", "host", 80, "/env/one"),
    ],
)
def test_an_address_is_read_as_it_is_written(url: str, host: str, port: int, path: str) -> None:
    from load_tests.shared.scaling_arguments import target_of_url

    target = target_of_url("it", url)
    assert (target.host, target.port, target.path) == (host, port, path)


@pytest.mark.parametrize("url", ["", "https://host", "http://host:port", "http://", "ftp://host"])
def test_what_cannot_be_measured_is_refused(url: str) -> None:
    from load_tests.shared.scaling_arguments import target_of_url

    with pytest.raises(InvalidPlan):
        target_of_url("it", url)
