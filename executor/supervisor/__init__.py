# SPDX-License-Identifier: Apache-2.0
"""The one thread that starts workers, assigns tasks to them, and records how each ended."""
