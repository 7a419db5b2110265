# SPDX-License-Identifier: Apache-2.0
"""The homes of the tests of environments."""

from __future__ import annotations

from ..environments.conftest import home as home
from ..environments.conftest import layout as layout
