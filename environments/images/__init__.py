# SPDX-License-Identifier: Apache-2.0
"""Container images of environments, which engines start replicas from.

recipe.py      what an image is made of: its Dockerfile, as text
context.py     the files that go into it: the project's, and those of the env host
build.py       has the `docker` command build it, unless there is one of the same files
docker_cli.py  runs that command, and explains its failures
"""
