# SPDX-License-Identifier: Apache-2.0
"""Whatever is sent to an environment is answered, or the connection closed: for hours.

The properties of `shared/ws_fuzzing.py`, each in turn with new examples: frames and heads against
`websockets`, conversations on `/ws` and `/mcp` of `openenv launch benchmark`, with shards and with
isolated sessions, and arbitrary bytes. A finding is printed with the smallest example; the rest
goes on.

    python -m load_tests.fuzz --minutes 60 --json findings.json
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from load_tests.peers.scaling_servers import openenv
from load_tests.shared import ws_fuzzing as fuzzing
from load_tests.shared.report import Report, daemon, parse_arguments

EXAMPLES = 100  # of each property before the next has its turn


def main() -> int:
    """Try until the time is over; the exit code says whether anything was found."""
    options = parse_arguments(
        "Whatever is sent is answered, or the connection closed.",
        repetitions=1,
        minutes={"type": float, "default": 1.0, "help": "how long"},
        seed={"type": int, "default": None, "help": "begin with these examples; otherwise others"},
        patience={
            "type": float,
            "default": fuzzing.PATIENCE_SECONDS,
            "help": "seconds for an answer; more on a machine that is busy with other work",
        },
    )
    fuzzing.PATIENCE_SECONDS = options.patience
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    deadline = time.monotonic() + 60 * options.minutes
    cases: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    began = time.monotonic()
    with daemon() as environ:
        properties = dict(_properties(_launched(environ, "shards"), ""))
        properties |= _properties(_launched(environ, "isolated", "--isolate"), ", isolated")
        properties |= {
            "frames": (fuzzing.check_frames, fuzzing.FRAMES),
            "heads": (fuzzing.check_head, fuzzing.HEADS),
        }
        number = seed
        while time.monotonic() < deadline:
            for name, (check, given) in properties.items():
                cases[name] += EXAMPLES
                try:
                    fuzzing.try_examples(check, given, EXAMPLES, number)
                except Exception as exc:
                    found = {"property": name, "seed": number, "error": _text_of(exc)}
                    findings.append(found)
                    print(json.dumps(found), flush=True)
            number += 1
    minutes = (time.monotonic() - began) / 60
    report = Report("Fuzzing")
    report.add("time", "min", [minutes])
    for name, count in cases.items():
        report.add(f"cases: {name}", "", [count])
    report.add("cases", "", [cases.total()])
    report.add("findings", "", [len(findings)])
    report.note(f"the first seed: {seed}")
    for found in findings:
        report.note(json.dumps(found))
    report.finish(options.json)
    return 1 if findings else 0


def _launched(environ: dict[str, str], name: str, *more: str) -> int:
    """The port of the benchmark environment, launched under this name."""
    words = ("launch", "benchmark", "--name", name, "--max-sessions", "64", *more)
    port = urlsplit(str(openenv(environ, *words)["environment"]["address"])).port
    assert port is not None
    return port


def _properties(port: int, where: str) -> Iterator[tuple[str, tuple[Any, fuzzing.Given]]]:
    for path in ("/ws", "/mcp"):
        check = fuzzing.conversation_check(port, path)
        yield f"conversations on {path}{where}", (check, fuzzing.CONVERSATIONS)
    yield f"bytes{where}", (fuzzing.stream_check(port), fuzzing.STREAMS)


def _text_of(exc: Exception) -> str:
    return "".join(traceback.format_exception(exc))[-4000:]


if __name__ == "__main__":
    sys.exit(main())
