# SPDX-License-Identifier: Apache-2.0
"""What a process of the env host does before it serves."""
