# SPDX-License-Identifier: Apache-2.0
"""Text and data: units, options, JSON lines, metrics, foreign text, secrets."""
