# SPDX-License-Identifier: Apache-2.0
"""Files and folders: locks, free space, rotated logs, what is installed."""
