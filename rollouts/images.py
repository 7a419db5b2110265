# SPDX-License-Identifier: Apache-2.0
"""Finds the images in observations, in every form that OpenEnv's environments use.

    text      base64 of a PNG, JPEG, GIF or WebP file, with or without `data:…;base64,` in front:
              dm_control, Unity, CARLA, OpenApp, and image content of MCP (`data`)
    rows      numbers of 0 to 255, as [height][width][3 or 4]: BrowserGym
    flat      the same without nesting; a field `<name>_shape` beside it has the shape: Atari
    array     a `uint8` array beside the step, of such a shape

Only the first bytes of a file decide its type, not a declared type; numbers become a PNG. So only
these four formats count as images, and never an SVG, which is a document.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

MAX_PIXELS = 40_000_000  # of a file: the browser has to unpack it in memory
MAX_BASE64 = 64 << 20  # characters
MIN_SIDE = 8  # of numbers: smaller ones are a board, or a vector
MIN_GRAY_SIDE = 32  # of numbers with one channel, which may be any matrix
_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # PNG's, by channels
_BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # segments that contain it
_JPEG_BARE = frozenset((*range(0xD0, 0xD8), 0x01))  # segments without a length

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """An image file."""

    media_type: str
    data: bytes
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.media_type}, {self.width} x {self.height}, {len(self.data):,} bytes"


def take_images(value: Any) -> tuple[Any, list[tuple[Place, Image]]]:
    """Take the images out of a JSON value.

    Returns:
        The value, in which a line replaces each image; the images with their places.
    """
    found: list[tuple[Place, Image]] = []
    return _taken(value, (), found), found


def _taken(value: Any, place: Place, found: list[tuple[Place, Image]], shape: object = None) -> Any:
    image = None
    if isinstance(shape, list) and isinstance(value, list):
        image = image_of_numbers(value, shape)
    image = image or image_of(value)
    if image is not None:
        found.append((place, image))
        return str(image)
    if isinstance(value, dict):
        return {
            key: _taken(item, (*place, key), found, value.get(f"{key}_shape"))
            for key, item in value.items()
        }
    if isinstance(value, list) and any(isinstance(item, dict | list | str) for item in value):
        return [_taken(item, (*place, at), found) for at, item in enumerate(value)]
    return value


def image_of(value: Any) -> Image | None:
    """Return a JSON value as an image, or None if it is not one."""
    if isinstance(value, list):
        return _image_of_rows(value)
    if not isinstance(value, str):
        return None
    text = value.partition(";base64,")[2] if value.startswith("data:image/") else value
    if not text.startswith(_BASE64_STARTS) or len(text) > MAX_BASE64:
        return None
    try:
        return image_of_file(base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, ValueError):
        return None


def image_of_file(data: bytes) -> Image | None:
    """Return a file's content as an image: a PNG, JPEG, GIF or WebP of a sensible size."""
    try:
        header = _parse_header(data)
    except (struct.error, IndexError):  # it ends before its dimensions
        return None
    if header is None:
        return None
    media_type, width, height = header
    fits = width > 0 and height > 0 and width * height <= MAX_PIXELS
    return Image(media_type, data, width, height) if fits else None


def _parse_header(data: bytes) -> tuple[str, int, int] | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
        return "image/png", *struct.unpack_from(">II", data, 16)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif", *struct.unpack_from("<HH", data, 6)
    if data.startswith(b"\xff\xd8\xff"):
        return _parse_jpeg(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _parse_webp(data)
    return None


def _parse_jpeg(data: bytes) -> tuple[str, int, int] | None:
    at = 2
    while data[at] == 0xFF:
        kind = data[at + 1]
        if kind in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return "image/jpeg", width, height
        at += 2 if kind in _JPEG_BARE else 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None


def _parse_webp(data: bytes) -> tuple[str, int, int] | None:
    kind = data[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return "image/webp", width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        return "image/webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        low, high, low_y, high_y = struct.unpack_from("<HBHB", data, 24)
        return "image/webp", (high << 16 | low) + 1, (high_y << 16 | low_y) + 1
    return None


def _image_of_rows(rows: list[Any]) -> Image | None:
    """Read colors in [height][width][channels]; a matrix without channels may be anything."""
    try:
        width, channels = len(rows[0]), len(rows[0][0])
        if channels not in (3, 4) or any(len(row) != width for row in rows):
            return None
        if any(len(pixel) != channels for pixel in chain.from_iterable(rows)):
            return None
        flat = list(chain.from_iterable(chain.from_iterable(rows)))
    except (TypeError, IndexError, KeyError):  # a part is not a list, or is empty
        return None
    return image_of_numbers(flat, [len(rows), width, channels])


def image_of_numbers(numbers: Sequence[int] | memoryview, shape: Sequence[Any]) -> Image | None:
    """Make a PNG of numbers from 0 to 255 in a flat list, row by row; None: they are no image.

    The shape is height and width, and channels: 1 or none are gray, 3 red, green and blue, 4 with
    alpha.
    """
    if len(shape) not in (2, 3) or not all(type(side) is int for side in shape):
        return None
    height, width, channels = (*shape, 1)[:3]
    least = MIN_GRAY_SIDE if channels == 1 else MIN_SIDE
    if channels not in _COLOR_TYPES or min(height, width) < least:
        return None
    if len(numbers) != height * width * channels or len(numbers) > MAX_PIXELS * channels:
        return None
    try:
        pixels = bytes(numbers)
    except (TypeError, ValueError):  # not whole numbers from 0 to 255
        return None
    stride = width * channels
    rows = b"".join(b"\0" + pixels[at : at + stride] for at in range(0, len(pixels), stride))
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    for kind, content in (b"IHDR", head), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""):
        check = zlib.crc32(kind + content)
        png += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
    return Image("image/png", png, width, height)
