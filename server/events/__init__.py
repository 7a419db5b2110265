# SPDX-License-Identifier: Apache-2.0
"""State changes and log lines, as they happen, for the clients that follow them."""
