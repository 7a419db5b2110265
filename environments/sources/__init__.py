# SPDX-License-Identifier: Apache-2.0
"""Reads a source: a bundled name, a project's folder, a class; finds the program that serves it."""
