# SPDX-License-Identifier: Apache-2.0
"""Values of JSON texts that may be large: observations, and the rows that hold them.

msgspec's parser makes the values, and a string with escapes once more. orjson's takes twelve times
the text's length for itself, anew each time: above some megabytes the C library maps that memory
and gives it back, and each of its pages costs a fault, all with the GIL held. An observation of a
megabyte held it for up to 6 ms; now it is 0.2 to 0.6, a list of numbers 3.

What msgspec refuses (half a surrogate pair, `NaN`) the standard library reads, as the environment's
own server did. Small texts of ours and of servers stay with orjson.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

_decode = msgspec.json.Decoder().decode


def parse(text: bytes | bytearray | memoryview | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply.
    """
    try:
        return _decode(text)
    except ValueError:
        return json.loads(bytes(text) if isinstance(text, memoryview) else text)
