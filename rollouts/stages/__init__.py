# SPDX-License-Identifier: Apache-2.0
"""What is done to episodes between collecting and writing: advantages, filters, training samples."""
