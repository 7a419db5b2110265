# SPDX-License-Identifier: Apache-2.0
"""Prepares a source to run: a virtual environment here, or a container image.

prepare.py       makes what a provider names, and returns what its replicas run
project_venv.py  the virtual environment of a project, made by uv.py, or laid over one
                 another
image_build.py   builds an image of image_context.py
venv_cleanup.py  removes those that nothing uses
"""
