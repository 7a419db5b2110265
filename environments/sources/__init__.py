# SPDX-License-Identifier: Apache-2.0
"""Reads what can be launched: a bundled name, a project folder, a class; and what of it runs."""
