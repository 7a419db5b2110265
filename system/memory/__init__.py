# SPDX-License-Identifier: Apache-2.0
"""Memory and pids: cgroups of both versions, limits, usage."""
