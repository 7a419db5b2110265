# SPDX-License-Identifier: Apache-2.0
"""The one build step that `pyproject.toml` cannot express: build from the tree, not from `build/`.

setuptools copies modules into `build/lib`, packs what lies there, and never removes a module that
the tree no longer has (https://github.com/pypa/setuptools/issues/1347): a second `pip install .`
in the same clone would install modules of the version before.
"""

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildFromTree(build_py):
    """Copies the modules into an empty folder."""

    def run(self) -> None:
        """Remove what an earlier build left behind, then build."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """All modules of a package but this file: the root of the repository is a package, too."""
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if each[:2] != ("openenvd", "setup")]


setup(cmdclass={"build_py": BuildFromTree})
