# SPDX-License-Identifier: Apache-2.0
"""Parts in columns: Parquet for datasets, Arrow for mapping. Needs `pyarrow` (extra `arrow`).

A part grows as JSONL, which a crash cannot spoil, and is converted as a whole when it is finished,
a bounded batch of rows at a time. Large arrays stay beside it as raw bytes. What has no fixed form
(observations, actions, info) is a column of JSON text.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from ...system.extras import install_command
from ..errors import RolloutError
from ..json_values import parse
from .disk import Disk, digest_of, typed
from .layout import (
    ARRAYS,
    EPISODES,
    PARQUET,
    STEPS,
    Block,
    Part,
    PartFile,
    file_name,
    partial,
)
from .part import OpenPart

BATCH_BYTES = 8 << 20  # of rows in memory; a row group
JSON_COLUMNS = ("observation", "action", "info", "final_observation")
COLUMNS = {
    STEPS: {
        "episode_id": "text",
        "step": "int",
        "observation": "text",
        "action": "text",
        "info": "text",
        "reward": "real",
        "done": "bool",
    },
    EPISODES: {
        "episode_id": "text",
        "environment": "text",
        "seed": "int",
        "status": "text",
        "total_reward": "real",
        "attempts": "int",
        "started_at": "real",
        "finished_at": "real",
        "failure_reason": "text",
        "failure_message": "text",
        "failure_step": "int",
        **dict.fromkeys((block.name for block in fields(Block)), "int"),
        "advantage": "real",
        "filtered": "text",
        "final_observation": "text",
    },
}
ARRAY = {"name": "text", "dtype": "text", "offset": "int", "bytes": "int"}
_skim = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def in_columns(part: OpenPart, form: str, disk: Disk) -> Part:
    """The part with its rows in `form`, under temporary names and on the medium."""
    plain = part.finished()
    files = [file for file in plain.files if file.name == part.files[ARRAYS].path.name]
    kinds = [kind for kind in (STEPS, EPISODES) if part.files[kind].size_bytes]
    files += [_convert(part, kind, form, disk) for kind in kinds]
    return Part(plain.number, tuple(files), plain.episode_ids, plain.steps)


def _convert(part: OpenPart, kind: str, form: str, disk: Disk) -> PartFile:
    source = partial(part.files[kind].path)
    path = source.with_name(file_name(kind, part.number, form))
    with typed(path):
        _write(source, partial(path), kind, form)
    disk.sync(partial(path))
    digest = digest_of(partial(path)).hexdigest()
    return PartFile(path.name, partial(path).stat().st_size, digest)


def _write(source: Path, target: Path, kind: str, form: str) -> None:
    pyarrow = arrow()
    schema = _schema(pyarrow, kind)
    with target.open("wb") as file, _writer(pyarrow, file, schema, form) as writer:
        for rows in _batches(source):
            writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=schema))


def _writer(pyarrow: Any, file: Any, schema: Any, form: str) -> Any:
    if form == PARQUET:
        return arrow("pyarrow.parquet").ParquetWriter(file, schema, compression="zstd")
    return pyarrow.ipc.new_file(file, schema)


def _batches(source: Path) -> Iterator[list[dict[str, Any]]]:
    """Rows with their free-form columns as text, so many at a time as fit."""
    rows: list[dict[str, Any]] = []
    size_bytes = 0
    with source.open("rb") as file:
        for line in file:
            rows.append(_row(line))
            size_bytes += len(line)
            if size_bytes >= BATCH_BYTES:
                yield rows
                rows, size_bytes = [], 0
    if rows:
        yield rows


def _row(line: bytes) -> dict[str, Any]:
    """Splits a line into columns, and leaves the free-form ones as the texts they are.

    Parsed and written again, `NaN` or a number of very many digits would become another.
    """
    try:
        fields = _skim(line)
    except msgspec.DecodeError:  # the standard library's JSON says more than others can read
        found: dict[str, Any] = parse(line)
        return {n: json.dumps(v) if n in JSON_COLUMNS else v for n, v in found.items()}
    return {
        n: str(memoryview(v), "utf-8") if n in JSON_COLUMNS else parse(memoryview(v))
        for n, v in fields.items()
    }


def _schema(pyarrow: Any, kind: str) -> Any:
    types = {"text": pyarrow.large_string(), "int": pyarrow.int64()}
    types |= {"real": pyarrow.float64(), "bool": pyarrow.bool_()}
    columns = [(name, types[form]) for name, form in COLUMNS[kind].items()]
    if kind == STEPS:
        array = [(name, types[form]) for name, form in ARRAY.items()]
        array.append(("shape", pyarrow.list_(types["int"])))
        columns.append(("arrays", pyarrow.list_(pyarrow.struct(array))))
    return pyarrow.schema(columns)


def arrow(module: str = "pyarrow") -> Any:
    """`pyarrow` or another module of the extra."""
    return needed(module, install_command("arrow"))


def needed(module: str, install: str) -> Any:
    """Return a module that is no dependency of everybody; `install` is the command that has it."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise RolloutError(f"the module {module} is not installed: {exc}", install) from exc
