# SPDX-License-Identifier: Apache-2.0
"""The environment that is served.

definition.py      what is served, from a class     upstream_project.py  the same from a project
instances.py       creating and calling one         interfaces.py        base classes
plan.py            how many sessions and shards     upstream_types.py    what upstream's package has
own_middleware.py  a project's middleware           source_analysis.py   what its source tells
deferred_imports.py gradio and fastmcp, when used
"""
