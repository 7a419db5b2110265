# SPDX-License-Identifier: Apache-2.0
"""The mutants that `.ci/mutants.py` draws change what runs, and are the same for the same seed."""

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''\
"""A docstring that names nothing."""
if TYPE_CHECKING:
    import nothing

class Door:
    """One line."""

    size: "int" = 3

    def __repr__(self) -> str:
        return self.name or "door"

    async def open(self, width: int, *, key: str = "ü") -> bool:
        log.info("opens %s", width)
        while not self.is_open:
            if width < self.size and self.fits(width + 1):
                await self.lock.turn(key)
                self.is_open = True
                continue
            raise TooWide(f"{width + 1}")
        return self.is_open
'''
FITS = "width < self.size and self.fits(width + 1)"
CHANGES = {
    ("3", "4"),
    ("'ü'", "'üX'"),
    ("not self.is_open", "(self.is_open)"),
    (FITS, f"(not ({FITS}))"),
    (FITS, f"({FITS.replace('and', 'or')})"),
    ("width < self.size", "(width <= self.size)"),
    ("width + 1", "(width - 1)"),
    ("1", "2"),
    ("await self.lock.turn(key)", "pass"),
    ("self.is_open = True", "pass"),
    ("True", "False"),
    ("continue", "break"),
    ("raise TooWide(f'{width + 1}')", "pass"),
    ("return self.is_open", "return None"),
}


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = spec_from_file_location("mutants", ROOT / ".ci" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_each_place_that_runs_is_changed_and_nothing_else(mutants: ModuleType) -> None:
    found = mutants.mutants_of("door.py", MODULE.encode())
    assert {(mutant.before, mutant.after) for mutant in found} == CHANGES
    original = ast.dump(ast.parse(MODULE))
    changed = {ast.dump(ast.parse(mutant.apply(MODULE.encode()))) for mutant in found}
    assert len(changed - {original}) == len(CHANGES)


def test_a_seed_draws_the_same_mutants_also_after_a_change_elsewhere(
    mutants: ModuleType, tmp_path: Path
) -> None:
    rooms = [tmp_path / room for room in mutants.ROOMS]
    for room in rooms:
        room.mkdir(parents=True)
        (room / "door.py").write_text(MODULE)
        (room / "gate.py").write_text("".join(f"size{n} = {n}\n" for n in range(22)))
    drawn = mutants.draw(tmp_path, 24, seed=1)
    assert mutants.draw(tmp_path, 24, seed=1) == drawn
    assert mutants.draw(tmp_path, 24, seed=2) != drawn
    assert len({(mutant.path, mutant.lines) for mutant in drawn}) == 24
    for room in rooms:
        (room / "door.py").write_text(f"import more\n{MODULE}")
    again = {mutant.key for mutant in mutants.draw(tmp_path, 24, seed=1)}
    assert again == {mutant.key for mutant in drawn}
