# SPDX-License-Identifier: Apache-2.0
"""`echo`: answers each message with the same message."""
