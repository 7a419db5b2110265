# SPDX-License-Identifier: Apache-2.0
"""Grids and addresses as `load_tests.scaling` is given them on its command line."""

from __future__ import annotations

from urllib.parse import urlsplit

from openenvd.bench.errors import InvalidPlan
from openenvd.bench.target import HTTP_PORT, Target
from openenvd.system.access_tokens import without_token


def parse_grid(name: str, text: str) -> tuple[float, ...]:
    """`32,128,512` as numbers.

    Raises:
        InvalidPlan: something in it is none, or there is nothing in it.
    """
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as exc:
        raise InvalidPlan(f"the grid of {name}: {exc}", "write numbers: 32,128,512") from exc
    if not values:
        raise InvalidPlan(f"the grid of {name} is empty", "write numbers: 32,128,512")
    return values


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    """The same for what can only be counted.

    Raises:
        InvalidPlan
    """
    values = parse_grid(name, text)
    if any(not value.is_integer() for value in values):
        raise InvalidPlan(f"the grid of {name} has parts of one: {text}", "write whole numbers")
    return tuple(int(value) for value in values)


def target_of_url(name: str, url: str) -> Target:
    """A server that runs already: `http://host:port`, `ws://host:port/ws`, or `host:port`.

    Raises:
        InvalidPlan: it is no address, or one that only TLS reaches.
    """
    full, token = without_token(url if "://" in url else f"http://{url}")
    try:
        parts = urlsplit(full)
        port = parts.port
    except ValueError as exc:
        raise InvalidPlan(f"{url!r} is not an address: {exc}", "write http://host:8000") from exc
    if parts.scheme not in ("http", "ws") or not parts.hostname:
        raise InvalidPlan(
            f"{url!r} cannot be measured: generators speak plain HTTP and WebSocket",
            "write http://host:8000",
        )
    path = parts.path.rstrip("/").removesuffix("/ws")
    return Target(name, f"http://{parts.hostname}:{port or HTTP_PORT}{path}", token=token)
