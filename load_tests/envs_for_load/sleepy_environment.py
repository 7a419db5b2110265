# SPDX-License-Identifier: Apache-2.0
"""An environment whose import takes very long: its launch holds a LONG worker."""

from __future__ import annotations

import os
import time

time.sleep(float(os.environ.get("SLEEPY_SECONDS", "3600")))


class SleepyEnvironment:
    """Never reached."""
