# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's own tests of its server on its server and on ours.

    python -m smoke_tests.upstream.upstream_suites --upstream-source DIR [--json FILE] [--work DIR]
        [--only server,mcp,envs]

DIR is an existing checkout of upstream's repository, with its package; uv installs the package's
dependencies. The unchanged tests run once with their own server, and once with the plugin
`in_project_venv/suite_on_ours.py`, which sends their requests to our env host. A suite that starts
no env host proves nothing, and fails.

Exit code 1: a test passes on upstream's server and not on ours, and is not in `KNOWN`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from ..conftest import make_venv

PLUGINS = Path(__file__).resolve().parent / "in_project_venv"
SUITE_SECONDS = 1800.0
# What pytest and a fast env host of ours need beside upstream's own requirements.
MORE = ("pytest>=8", "pytest-asyncio", "pytest-timeout", "uvicorn>=0.35", "uvloop", "httptools")
TEST_SECONDS = "120"
SUITES = {
    "server": (
        "tests/core/test_production_mode_routes.py",
        "tests/core/test_simulation_mode_preserves_api.py",
        "tests/core/test_production_mode_mcp.py",
        "tests/core/test_mode_selection.py",
        "tests/core/test_web_interface.py",
        "tests/core/test_web_interface_layout.py",
        "tests/core/test_types_and_enums.py",
    ),
    "mcp": ("tests/core/test_mcp",),
    "envs": ("tests/envs/test_websockets.py",),
}
# Differences on purpose, with reasons.
KNOWN = {
    "TestMCPErrorResponses::test_invalid_json_returns_parse_error": (
        "a POST without `content-type: application/json` is refused (415) before its body is read, "
        "so that web pages of other origins cannot send it"
    ),
    "TestSimulationModeWebSocketEndpoint::test_simulation_mode_websocket_step_works": (
        "a session's steps before its first reset are refused, as its client may have lost another"
    ),
}

Outcomes = dict[str, str]  # of each test: passed, failed, skipped


@dataclass
class Suite:
    """The outcomes of one suite."""

    name: str
    upstream: Outcomes = field(default_factory=dict)
    ours: Outcomes = field(default_factory=dict)
    env_hosts: int = 0

    @property
    def differences(self) -> list[str]:
        passed = [test for test, outcome in self.upstream.items() if outcome == "passed"]
        return [test for test in passed if self.ours.get(test) != "passed"]

    @property
    def line(self) -> str:
        cells = [self.name, *map(_count, (self.upstream, self.ours)), str(self.env_hosts)]
        return "".join(f"{cell:<28}" for cell in cells).rstrip()


def _count(outcomes: Outcomes) -> str:
    counts = Counter(outcomes.values())
    tried = counts["passed"] + counts["failed"]
    return f"{counts['passed']} of {tried}, {counts['skipped']} skipped"


class Tests:
    """Upstream's tests, in a virtual environment made for them."""

    def __init__(self, source: Path, work: Path) -> None:
        self._source = source.resolve()
        self._work = work
        self._python = work / "suite-venv" / "bin" / "python"

    def prepare(self) -> None:
        if (self._work / "suite-venv" / "complete").exists():
            return
        requirements = ("-r", str(self._source / "pyproject.toml"), *MORE)
        make_venv(self._python.parents[1], "--compile-bytecode", *requirements)
        (self._work / "suite-venv" / "complete").touch()

    def run(self, name: str) -> Suite:
        suite = Suite(name)
        suite.upstream = self._outcomes(name, {})
        report = self._work / f"{name}.env_hosts"
        report.unlink(missing_ok=True)
        suite.ours = self._outcomes(name, {"SUITE_REPORT": str(report)}, "-p", "suite_on_ours")
        suite.env_hosts = int(report.read_text()) if report.exists() else 0
        return suite

    def _outcomes(self, name: str, variables: dict[str, str], *options: str) -> Outcomes:
        paths = [self._source / "src", self._source / "envs", PLUGINS]
        variables |= {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        environ = {**os.environ, **variables}
        files = [path for path in SUITES[name] if (self._source / path).exists()]
        results = self._work / f"{name}.xml"
        plain = ["-q", "-p", "no:cacheprovider", "-p", "patient_servers", "--timeout", TEST_SECONDS]
        plain += ["--junitxml", str(results)]
        command = [str(self._python), "-m", "pytest", *plain, *options, *files]
        log = self._work / f"{name}{'-ours' if options else '-upstream'}.log"
        with log.open("w") as output:
            subprocess.run(
                command,
                cwd=self._source,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SUITE_SECONDS,
                check=False,
            )
        return dict(_outcomes_in(results))


def _outcomes_in(results: Path) -> Iterator[tuple[str, str]]:
    for case in ET.parse(results).iter("testcase"):
        marks = {child.tag for child in case}
        outcome = "failed" if marks & {"failure", "error"} else "passed"
        test = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        yield test, "skipped" if "skipped" in marks else outcome


@contextmanager
def folder_for(work: Path | None) -> Iterator[Path]:
    """Yield `work`, which is kept, or else a temporary folder."""
    if work is None:
        with tempfile.TemporaryDirectory(
            prefix="openenvd-suites-", ignore_cleanup_errors=True
        ) as made:
            yield Path(made)
    else:
        work.mkdir(parents=True, exist_ok=True)
        yield work.resolve()


def main() -> int:
    parser = argparse.ArgumentParser(description="Upstream's server tests on both servers.")
    parser.add_argument("--upstream-source", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", default=",".join(SUITES), metavar="SUITE,...")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep installations there")
    options = parser.parse_args()
    if not (options.upstream_source / "tests" / "core").is_dir():
        parser.error(f"{options.upstream_source} is no checkout of upstream's repository")
    with folder_for(options.work) as work:
        tests = Tests(options.upstream_source, work)
        tests.prepare()
        print("".join(f"{title:<28}" for title in ("suite", "upstream", "ours", "env hosts")))
        suites = []
        for name in options.only.split(","):
            suites.append(tests.run(name))
            print(suites[-1].line, flush=True)
            for test in suites[-1].differences:
                print(f"  not on ours: {test}: {KNOWN.get(test, 'why?')}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(suite) for suite in suites], indent=1) + "\n")
    unknown = [test for suite in suites for test in suite.differences if test not in KNOWN]
    return 1 if unknown or not all(suite.env_hosts for suite in suites) else 0


if __name__ == "__main__":
    sys.exit(main())
