# SPDX-License-Identifier: Apache-2.0
"""Wraps the operating system, with only the standard library. Every package may import it.

The env host imports it inside other projects' Pythons, and a shim most of it, so it is light: the
modules of a shim import no dataclasses, pathlib or subprocess. Only `process/macos.py` imports
psutil, on first use, where there is no /proc.

    files/     disk_space.py, log_files.py, installation.py (and extras)
    net/       http_limits.py (of a connection), connection_limit.py (of their number),
               listening_sockets.py, access.py (tokens, origins), websocket.py (frames),
               traceparent.py
    process/   process_identity.py (and locks), proc.py,
               tree.py (members; terminate, grace, kill, wait),
               forking.py, prctl.py, signal_pipe.py, descriptors.py (JSON with descriptors),
               diagnose.py (from `Evidence` to an `ExitReason`), oom_evidence.py, exit_reason.py,
               macos.py, loop_lag.py, backoff.py, standard_streams.py
    memory/    cgroup_tree.py (this process's groups, free memory), cgroups.py, limits.py (of CPU,
               memory and processes), usage.py (of processes and trees)
    text/      units.py, options.py, json_lines.py, prometheus.py, safe_text.py (foreign text,
               secrets)
"""
