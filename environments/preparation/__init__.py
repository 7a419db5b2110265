# SPDX-License-Identifier: Apache-2.0
"""What a source needs before it runs: a virtual environment here, or a container image.

project_venv.py  the virtual environment of a project, made by uv.py from package_index.py's index;
                 venv_overlay.py: one above another; venv_cleanup.py: removes those without a use
image_build.py   builds an image of image_context.py and image_recipe.py; image_cleanup.py removes
                 what nothing uses
"""
