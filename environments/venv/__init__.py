# SPDX-License-Identifier: Apache-2.0
"""Virtual environments of upstream projects: made, kept by lock file, removed."""
