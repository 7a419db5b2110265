# SPDX-License-Identifier: Apache-2.0
"""What is removed when nothing uses it any more."""
