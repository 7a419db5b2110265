# SPDX-License-Identifier: Apache-2.0
"""Shared by the processes of one env host: descriptor passing, the scoreboard, configuration."""
