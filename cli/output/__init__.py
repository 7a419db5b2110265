# SPDX-License-Identifier: Apache-2.0
"""The text and the JSON that commands print."""
