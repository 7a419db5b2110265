# SPDX-License-Identifier: Apache-2.0
"""Prepares a source to run: a virtual environment here, or a container image.

prepare.py       makes the program or image that a provider requires
project_venv.py  the virtual environment of a project, and environments that are laid over others;
                 uv.py runs uv
image_build.py   builds images, of the files that image_context.py collects
venv_cleanup.py  removes virtual environments that nothing uses
"""
