# SPDX-License-Identifier: Apache-2.0
"""What the operating system gives a process: standard library alone, for every room to import."""
