# SPDX-License-Identifier: Apache-2.0
"""The body of each transaction: functions over a connection, and the journal of their events."""
