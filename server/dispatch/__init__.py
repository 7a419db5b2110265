# SPDX-License-Identifier: Apache-2.0
"""The dispatcher: claims pending requests, hands them to the executor, records how they ended."""
