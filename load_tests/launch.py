# SPDX-License-Identifier: Apache-2.0
"""`launch echo` with the daemon up: from request to ready, and how soon `--async` returns.

Aims: request to ready under 1 s; `--async` back within 50 ms of the command line being loaded
(`openenv launch --help` is what loading costs).
"""

from __future__ import annotations

import json

from load_tests.shared.report import OPENENV, Report, daemon, parse_arguments, run


def main() -> None:
    """Measure, in turn."""
    options = parse_arguments("Launching echo.", repetitions=10)
    waited: list[float] = []
    to_ready: list[float] = []
    loading: list[float] = []
    returned: list[float] = []
    with daemon() as environ:
        for number in range(options.repetitions + 1):
            launch = [OPENENV, "launch", "echo", "--json", "--name"]
            finished = run([*launch, f"waited-{number}"], environ)
            waited.append(finished.seconds)
            request_id = json.loads(finished.output)["request_id"]
            shown = json.loads(run([OPENENV, "wait", request_id, "--json"], environ).output)
            to_ready.append(_seconds_to_ready(shown))
            run([OPENENV, "down", f"waited-{number}"], environ)
            loading.append(run([OPENENV, "launch", "--help"], environ).seconds)
            submitted = run([*launch, f"async-{number}", "--async"], environ)
            returned.append(submitted.seconds)
            run([OPENENV, "wait", json.loads(submitted.output)["request_id"]], environ)
            run([OPENENV, "down", f"async-{number}"], environ)
    report = Report("Launching echo")
    report.add("openenv launch echo, the whole command", "s", waited[1:])
    report.add("  request to ready (aim: 1)", "s", to_ready[1:])
    report.add("openenv launch --help: what loading costs", "s", loading[1:])
    report.add("openenv launch --async echo, the whole command", "s", returned[1:])
    beyond = [a - b for a, b in zip(returned[1:], loading[1:], strict=True)]
    report.add("  beyond loading (aim: 0.05)", "s", beyond)
    report.finish(options.json)


def _seconds_to_ready(answer: dict[str, object]) -> float:
    request = answer.get("request", answer)
    assert isinstance(request, dict)
    return float(request["finished_at"]) - float(request["created_at"])


if __name__ == "__main__":
    main()
