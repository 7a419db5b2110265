# SPDX-License-Identifier: Apache-2.0
"""When a run directory is held to be removed, with a clock of the tests' own."""

from __future__ import annotations

from openenvd.environments.shim.files import REMOVED_SECONDS, RunDirectoryWatch

NOW = 1000.0


def test_a_home_missing_at_one_look_alone_is_not_removed() -> None:
    home = RunDirectoryWatch()
    seen = [(0.0, True), (REMOVED_SECONDS, False), (2 * REMOVED_SECONDS, True)]
    looks = [(home.look(NOW + at, is_missing=missing), home.is_missing) for at, missing in seen]
    assert looks == [(False, True), (False, False), (False, True)]


def test_a_home_that_stays_missing_is_gone() -> None:
    home = RunDirectoryWatch()
    assert not home.look(NOW, is_missing=True)
    assert not home.look(NOW + REMOVED_SECONDS / 2, is_missing=True)
    assert home.look(NOW + REMOVED_SECONDS, is_missing=True)
