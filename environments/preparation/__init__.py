# SPDX-License-Identifier: Apache-2.0
"""Container images of environments: `build.py` has them built of `context.py` and `recipe.py`."""
