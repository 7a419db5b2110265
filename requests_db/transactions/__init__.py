# SPDX-License-Identifier: Apache-2.0
"""What one transaction does: functions over a connection, and the journal of events they write."""
