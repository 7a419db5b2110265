# SPDX-License-Identifier: Apache-2.0
"""Units of memory."""

MB = 2**20
