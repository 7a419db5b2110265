# SPDX-License-Identifier: Apache-2.0
"""What this process, and one that it starts, may use: CPU, memory, pids."""
