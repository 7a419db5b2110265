# SPDX-License-Identifier: Apache-2.0
"""The environment that is served.

definition.py        what is served, from a class     upstream_project.py  the same from a project
instances.py         creating and calling one         interfaces.py        base classes of our own
plan.py              how many sessions and shards     mcp_types.py         JSON-RPC and MCP types
own_middleware.py    a project's middleware           gradio_stub.py    keeps gradio out
deferred_mcp.py      imports fastmcp when it is used
factory_class.py     the class that a factory makes
factory_trial.py     creates one environment to see it
notes.py             what earlier launches of a project have found out
"""
