# SPDX-License-Identifier: Apache-2.0
"""The lightweight entry point of a shim: `python -I -S environments/shim/__main__.py <run_dir>`.

It is run by path, so that neither `site` nor site-packages nor `runpy` is needed (3 MB and 20 ms):
the package is made importable from this file's folder, and nothing else of it is loaded.
"""

import os
import sys
import types

package = types.ModuleType("openenvd")
package.__path__ = [os.path.abspath(f"{__file__}/../../..")]  # noqa: PTH100
sys.modules["openenvd"] = package

if __name__ == "__main__":
    from openenvd.environments.shim.loop import main

    main()
