# SPDX-License-Identifier: Apache-2.0
"""What the processes of one env host share: descriptor passing, the scoreboard, configuration."""
