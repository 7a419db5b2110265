# SPDX-License-Identifier: Apache-2.0
"""How a process ended, with the evidence."""
