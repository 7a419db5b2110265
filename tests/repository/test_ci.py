# SPDX-License-Identifier: Apache-2.0
"""What `.ci/run` leaves out has not changed, and what it installs is what the project allows."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / ".ci" / "requirements.txt").read_text()
LOCKED_EXTRAS = ("dev", "docs")
RENEW = "renew it: bash .ci/run lock"


@pytest.fixture(scope="module")
def touched() -> ModuleType:
    spec = importlib.util.spec_from_file_location("touched", ROOT / ".ci" / "touched.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit of each of three hours."""
    monkeypatch.delenv("OPENENVD_CI_BASE", raising=False)
    git(tmp_path, "init", "-q", "-b", "main")
    for day in ("01T12", "02T10", "02T14"):
        (tmp_path / day).touch()
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-q", "-m", day, date=f"2026-01-{day}:00:00")
    return tmp_path


def git(folder: Path, *arguments: str, date: str = "2026-01-03T00:00:00") -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *who, *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", "GIT_COMMITTER_DATE": date},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.mark.parametrize(
    ("path", "engines"),
    [
        ("environments/engines/docker/engine.py", ["docker", "swarm"]),
        ("environments/engines/docker/options.py", ["docker", "swarm"]),
        ("environments/engines/swarm/engine.py", ["swarm"]),
        ("environments/engines/slurm/job.py", ["slurm"]),
        ("environments/engines/kubernetes/engine.py", []),
        ("environments/agent/replica.py", ["docker", "swarm", "slurm"]),
        ("environments/replica_state.py", ["docker", "swarm", "slurm"]),
        ("environments/preparation/image_build.py", ["docker", "swarm"]),
        ("smoke_tests/engines/slurm_engine.py", ["slurm"]),
        ("smoke_tests/engines/test_swarm_nodes.py", ["swarm"]),
        ("smoke_tests/providers/test_deaths.py", ["docker", "swarm", "slurm"]),
        ("docs/providers.md", []),
        ("server/daemon.py", []),
    ],
)
def test_an_engines_suites_run_where_its_code_or_tests_have_changed(
    touched: ModuleType, path: str, engines: list[str]
) -> None:
    assert touched.touched_engines({path}) == engines


def test_one_of_several_engines_is_drawn_and_each_is_drawn_by_some_commit(
    touched: ModuleType,
) -> None:
    engines = ["docker", "swarm", "slurm"]
    drawn = [touched.draw(engines, seed) for seed in range(100)]
    assert {len(each) for each in drawn} == {1}
    assert {name for each in drawn for name in each} == {*engines}
    assert touched.draw(engines, 7) == touched.draw(engines, 7)
    assert touched.draw([], 7) == []


def test_a_change_is_measured_from_the_newest_commit_that_is_a_day_older(
    touched: ModuleType, clone: Path
) -> None:
    (clone / "not_committed").touch()
    base = touched.find_base(on_branch=True, root=clone)
    assert base == git(clone, "rev-parse", "HEAD~2")
    assert touched.changed_paths(base, clone) == {"02T10", "02T14", "not_committed"}


def test_the_tests_of_a_branch_are_those_of_what_changed_since_it_left_main(
    touched: ModuleType, clone: Path
) -> None:
    main = git(clone, "rev-parse", "HEAD")
    git(clone, "checkout", "-q", "-b", "branch")
    git(clone, "commit", "-q", "--allow-empty", "-m", "one")
    assert touched.find_base(on_branch=True, root=clone) == main
    assert touched.find_base(on_branch=False, root=clone) != main


def test_there_is_no_base_outside_of_a_checkout_or_in_a_shallow_one(
    touched: ModuleType, clone: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert touched.find_base(on_branch=False, root=tmp_path_factory.mktemp("bare")) == ""
    shallow = tmp_path_factory.mktemp("shallow") / "clone"
    git(clone, "clone", "-q", "--depth", "1", f"file://{clone}", str(shallow))
    assert touched.find_base(on_branch=False, root=shallow) == ""


def test_the_tests_of_a_room_are_chosen_before_those_of_its_importers(
    touched: ModuleType, tmp_path: Path
) -> None:
    own, importers = tmp_path / "test_own.py", tmp_path / "test_importers.py"
    changed = tmp_path / "test_changed.py"
    for path in (own, importers, changed):
        path.write_text("\n" * 10)
    assert touched.choose([changed], [[own], [importers]], 25, seed=1) == [changed, own]
    assert touched.choose([changed], [[own], [importers]], 0, seed=1) == [changed]


def test_a_quick_answer_is_within_its_limit_however_many_tests_have_changed(
    touched: ModuleType,
) -> None:
    every = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    chosen = touched.test_files(every)
    assert sum(path.read_text().count("\n") for path in chosen) <= touched.QUICK_LINES


def test_who_imports_a_room_is_read_from_the_code(touched: ModuleType) -> None:
    assert "server" in touched.importers_of({"requests_db"})
    assert "system" not in touched.importers_of({"requests_db"})


def test_the_workflows_run_each_stage_and_another_name_is_refused_with_the_list() -> None:
    command = ["bash", str(ROOT / ".ci" / "run"), "lnt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    stages = set(done.stderr.rpartition(": ")[2].split())
    text = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    named = re.findall(r"^          - (?:{stage: )?([a-z][a-z -]*)(?:,|$)", text, re.MULTILINE)
    assert {each for names in named for each in names.split()} == stages - {"lock"}


def locked() -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", LOCK, re.MULTILINE))


def wanted() -> list[Requirement]:
    """What the locked extras ask for, those that they name among them."""
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for name in LOCKED_EXTRAS for text in extras[name])]
    found = [Requirement(text) for text in texts]
    named = [name for each in found if each.name == PROJECT["name"] for name in each.extras]
    found += [Requirement(text) for name in named for text in extras[name]]
    return [each for each in found if each.name != PROJECT["name"]]


def test_each_requirement_of_the_project_is_locked_to_a_version_that_it_allows() -> None:
    versions = locked()
    missing = [str(each) for each in wanted() if canonicalize_name(each.name) not in versions]
    assert missing == [], RENEW
    wrong = [
        str(each)
        for each in wanted()
        if versions[canonicalize_name(each.name)] not in each.specifier
    ]
    assert wrong == [], RENEW


def test_the_lock_has_what_the_project_asks_for_with_hashes_and_no_address() -> None:
    blocks = re.split(r"^(?=[a-z0-9-]+==)", LOCK, flags=re.MULTILINE)[1:]
    asked = {
        block.partition("==")[0]
        for block in blocks
        if f"{PROJECT['name']} (pyproject.toml)" in block
    }
    assert asked == {canonicalize_name(each.name) for each in wanted()}, RENEW
    assert blocks
    assert all("--hash=sha256:" in block for block in blocks)
    assert "://" not in LOCK
    assert "-url" not in LOCK
