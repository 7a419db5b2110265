# SPDX-License-Identifier: Apache-2.0
"""Acts at random, by the JSON schema of the actions (`GET /schema` of any OpenEnv server).

Optional fields are left out half of the time. An episode has the same actions each time, because
the generator is seeded with its id and its seed; the latter is shared by its group.
"""

from __future__ import annotations

import json
import random
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit, urlunsplit

import orjson

from ...system.net.access import bearer_header, without_token
from ...system.text.json_lines import Json
from ..answers import Answer
from ..errors import NoEnvironment
from ..session_pool import environment_url
from .policy import Act, CpuThreads, Encoded, Policy, Turn

SCHEMA_SECONDS = 30.0
DEEPEST = 8  # a schema may refer to itself
MAX_ITEMS = 4
MAX_TEXT = 12
NUMBERS = (-100, 100)  # where the schema sets no bounds
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LEFT_TO_THE_SERVER = frozenset({"metadata"})  # every action of OpenEnv's has it; servers ignore it


@dataclass(frozen=True, slots=True)
class RandomPolicy(Policy):
    """Actions drawn from a schema; without a memory, as a branch draws actions of its own."""

    schema: Json

    def player(self, threads: CpuThreads, memory: None) -> Act:
        """Begin an attempt. Drawing an action takes less than a millisecond, without a thread."""
        rng: random.Random | None = None

        async def act(answer: Answer, turn: Turn) -> Encoded:
            nonlocal rng
            seed = f"{turn.episode_id} {turn.seed}"
            rng = rng or random.Random(seed)  # noqa: S311  # an action is no secret
            return Encoded(orjson.dumps(sample(self.schema, rng)), b"{}", {})

        return act


def action_schema(address: str) -> Json:
    """Ask a server for the JSON schema of an action. Blocks."""
    address, token = without_token(address)
    parts = urlsplit(environment_url(address))
    scheme, path = parts.scheme.replace("ws", "http"), parts.path.removesuffix("/ws")
    url = urlunsplit((scheme, parts.netloc, f"{path}/schema", "", ""))
    try:
        request = urllib.request.Request(url, headers=bearer_header(token))  # noqa: S310
        with urllib.request.urlopen(request, timeout=SCHEMA_SECONDS) as response:  # noqa: S310
            found = json.load(response)
        schema: Json = found["action"]
    except (HTTPError, ValueError, KeyError, TypeError) as exc:
        raise NoEnvironment(f"{url} has no schema of actions: {exc}") from exc
    except (OSError, HTTPException) as exc:
        why = getattr(exc, "reason", exc)
        raise NoEnvironment(f"nothing answers at {address}: {why}") from exc
    return schema


def properties(schema: Json) -> dict[str, Json]:
    """Return the schemas of an action's fields, by name; empty for a union."""
    resolve, fields = _Sampler(schema, random.Random()), schema.get("properties", {})  # noqa: S311
    return {n: resolve.simplest(of) for n, of in fields.items() if n not in _LEFT_TO_THE_SERVER}


def sample(schema: Json, rng: random.Random) -> Any:
    """Draw a value that the schema allows."""
    return _Sampler(schema, rng).draw(schema, 0)


@dataclass(frozen=True, slots=True)
class _Sampler:
    root: Json
    rng: random.Random

    def draw(self, schema: Json, depth: int) -> Any:
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.rng.choice(schema["enum"])
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self.draw(self._choose(schema[union], depth), depth)
        if "allOf" in schema:
            return self.draw(_merged(map(self._resolved, schema["allOf"]), schema), depth)
        return self._of_type(schema, depth)

    def _of_type(self, schema: Json, depth: int) -> Any:
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            kind = self.rng.choice(kind)
        draw = {
            "object": self._object,
            "array": self._array,
            "integer": self._integer,
            "number": lambda *_: self.rng.uniform(*_bounds(schema, step=1e-9)),
            "boolean": lambda *_: self.rng.random() < 0.5,
            "null": lambda *_: None,
        }.get(kind, self._text)
        return draw(schema, depth)

    def _choose(self, options: list[Json], depth: int) -> Json:
        """Choose any schema; at a great depth the simplest one, so that the recursion ends."""
        if depth < DEEPEST:
            return self.rng.choice(options)
        return min(options, key=lambda option: "$ref" in option or "properties" in option)

    def _object(self, schema: Json, depth: int) -> Json:
        required = set(schema.get("required", ()))
        drawn = {}
        for name, of in schema.get("properties", {}).items():
            is_optional = depth < DEEPEST and name not in _LEFT_TO_THE_SERVER
            if name in required or (is_optional and self.rng.random() < 0.5):
                drawn[name] = self.draw(of, depth + 1)
        return drawn

    def _array(self, schema: Json, depth: int) -> list[Any]:
        if "prefixItems" in schema:
            return [self.draw(of, depth + 1) for of in schema["prefixItems"]]
        least = schema.get("minItems", 0)
        most = least if depth >= DEEPEST else schema.get("maxItems", max(least, MAX_ITEMS))
        count = self.rng.randint(least, most)
        return [self.draw(schema.get("items", {}), depth + 1) for _ in range(count)]

    def _integer(self, schema: Json, _depth: int) -> int:
        low, high = _bounds(schema, step=1)
        multiple = schema.get("multipleOf", 1)
        return int(self.rng.randint(int(-(-low // multiple)), int(high // multiple)) * multiple)

    def _text(self, schema: Json, _depth: int) -> str:
        least = schema.get("minLength", 0)
        most = max(least, min(schema.get("maxLength", MAX_TEXT), MAX_TEXT))
        return "".join(self.rng.choices(_LETTERS, k=self.rng.randint(max(least, 1), max(most, 1))))

    def simplest(self, schema: Json) -> Json:
        """Resolve a schema's references; of `X | None`, return the schema of X."""
        schema = self._resolved(schema)
        parts = [part for part in schema.get("anyOf", ()) if part.get("type") != "null"]
        return self._resolved(parts[0]) if len(parts) == 1 else schema

    def _resolved(self, schema: Json) -> Json:
        while "$ref" in schema:
            target: Any = self.root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                target = target[part]
            schema = target
        return schema


def _merged(parts: Any, schema: Json) -> Json:
    merged: Json = {key: value for key, value in schema.items() if key != "allOf"}
    for part in parts:
        properties = {**merged.get("properties", {}), **part.get("properties", {})}
        required = [*merged.get("required", ()), *part.get("required", ())]
        merged = {**merged, **part, "properties": properties, "required": required}
    return merged


def _bounds(schema: Json, step: float) -> tuple[float, float]:
    low = schema.get("minimum", schema.get("exclusiveMinimum", None))
    high = schema.get("maximum", schema.get("exclusiveMaximum", None))
    if low is None:
        low = NUMBERS[0] if high is None else high - (NUMBERS[1] - NUMBERS[0])
    elif "minimum" not in schema:
        low += step
    if high is None:
        high = max(NUMBERS[1], low + NUMBERS[1])
    elif "maximum" not in schema:
        high -= step
    return low, high
