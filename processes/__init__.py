# SPDX-License-Identifier: Apache-2.0
"""What processes may use, how a tree of them is stopped, how one exited. Imports `system` alone.

tree.py      a process tree: its members; terminate, grace, kill, wait
macos.py     the same facts through psutil, where there is no /proc
resources/   limits.py (what may be used), memory.py (what is held), pids_limit.py
exits/       diagnose.py: from `Evidence` to an `ExitReason`; oom_evidence.py reads the kernel's
"""
