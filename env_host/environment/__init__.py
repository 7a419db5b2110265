# SPDX-License-Identifier: Apache-2.0
"""The environment that is served.

definition.py      what is served, from a class     upstream_project.py  the same from a project
instances.py       creating and calling one         interfaces.py        base classes
plan.py            how many sessions and shards     upstream_types.py    what upstream's package has
source_analysis.py what a project's source tells    deferred_imports.py  gradio and fastmcp, when
                                                                         they are used
"""
