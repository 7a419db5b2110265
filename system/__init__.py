# SPDX-License-Identifier: Apache-2.0
"""Operating-system facilities that every room may import, on the standard library alone.

Every room may import it, the env host too, which runs inside other projects' Pythons. A shim
imports most of it as well, so it is light: no dataclasses, pathlib or subprocess where a shim
comes by.

    processes      process_identity.py, proc.py, installation.py (what one runs from),
                   standard_streams.py
    forks          forking.py, prctl.py, signal_pipe.py
    memory groups  cgroup_tree.py (where we stand, what is left), cgroups.py, units.py
    wires          descriptors.py (JSON with descriptors), json_lines.py, websocket.py (frames)
    HTTP           http_limits.py (of a connection), connection_limit.py (of their number)
    files          file_locks.py
    logs           log_files.py, terminal_text.py (foreign text), hidden_values.py (secrets)
    time           backoff.py, loop_lag.py
    metrics        prometheus.py
"""
