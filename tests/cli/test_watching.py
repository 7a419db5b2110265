# SPDX-License-Identifier: Apache-2.0
"""The files that `openenv launch --watch` watches."""

from pathlib import Path

from openenvd.cli.watching import describe_change, files_below


def test_the_folder_of_a_rollout_is_not_watched(tmp_path: Path) -> None:
    (tmp_path / "env.py").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "000001.jsonl").touch()
    assert len(files_below(tmp_path)) == 2
    (tmp_path / "out" / "rollout.json").touch()
    assert list(files_below(tmp_path)) == [str(tmp_path / "env.py")]


def test_folders_that_links_lead_to_are_watched_once(tmp_path: Path) -> None:
    project, shared = tmp_path / "project", tmp_path / "shared"
    for folder in (project / "logs", shared):
        folder.mkdir(parents=True)
    (project / "shared").symlink_to(shared)
    (shared / "back").symlink_to(project)
    (project / "gone").symlink_to(tmp_path / "gone")
    (shared / "rules.py").write_text("one")
    (project / "logs" / "a").write_text("not of the project")
    before = files_below(project)
    assert list(before) == [str(project / "shared" / "rules.py")]
    (shared / "rules.py").write_text("another")
    assert describe_change(project, before, files_below(project)) == "shared/rules.py"
