# SPDX-License-Identifier: Apache-2.0
"""Keeps small JSON objects by key in a Ray cluster's own KV, in its GCS.

Imported where Ray's library is connected: in the driver, and in actors. Keys: `cluster.py`.
"""

from __future__ import annotations

import json

from ray.experimental import internal_kv

from ....system.text.json_lines import Json

NAMESPACE = "openenvd"  # of actors and placement groups, and of these keys
RECORD = "replica:{}"
REPORT = "report:{}"
_KEYS = NAMESPACE.encode()


def read(key: str) -> Json | None:
    """Return the object of a key; None when there is none."""
    data: bytes | None = internal_kv._internal_kv_get(key, namespace=_KEYS)
    try:
        found = json.loads(data or b"null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def write(key: str, value: Json) -> None:
    """Replace the object of a key."""
    data = json.dumps(value).encode()
    internal_kv._internal_kv_put(key, data, overwrite=True, namespace=_KEYS)


def delete(key: str) -> None:
    """Remove a key, if it is there."""
    internal_kv._internal_kv_del(key, namespace=_KEYS)


def keys(pattern: str) -> list[str]:
    """Return the keys of a kind: `RECORD`, `REPORT`."""
    found = internal_kv._internal_kv_list(pattern.format(""), namespace=_KEYS)
    return [key.decode() for key in found]
