# SPDX-License-Identifier: Apache-2.0
"""A build that holds 400 MB, in a child of the worker: more than the launch's limit."""

import time


def build_wheel(*_args: object, **_more: object) -> str:
    print("the build begins", flush=True)
    held = bytearray(400 << 20)
    held[::4096] = b"1" * len(held[::4096])
    time.sleep(0.5)
    raise SystemExit("built nothing")


def get_requires_for_build_wheel(*_args: object) -> list[str]:
    return []


build_editable = build_wheel
get_requires_for_build_editable = get_requires_for_build_wheel
