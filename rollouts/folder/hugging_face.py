# SPDX-License-Identifier: Apache-2.0
"""Rollouts as a dataset of Hugging Face's `datasets`, which is no dependency of ours.

Left to itself `datasets` guesses the columns' types from the first megabytes of the first file, and
refuses the next file where a null has become a number, or an observation has another form. So it is
told the types; what has no fixed form is its `Json`, which gives back what was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import RolloutError
from .columnar import ARRAY, COLUMNS, JSON_COLUMNS, needed
from .layout import ARROW, JSONL, PARQUET, STEPS

INSTALL = "pip install -U datasets"
BUILDERS = {JSONL: "json", PARQUET: "parquet", ARROW: "arrow"}
_VALUES = {"text": "string", "int": "int64", "real": "float64", "bool": "bool"}


def features(kind: str = STEPS) -> Any:
    """The `datasets.Features` of `steps` or `episodes`, in any format.

    Raises:
        RolloutError: `datasets` is not installed, or too old.
    """
    datasets = needed("datasets", INSTALL)
    if not hasattr(datasets, "Json"):
        version = datasets.__version__
        raise RolloutError(f"datasets {version} has no type for JSON", INSTALL)
    value = {name: datasets.Value(told) for name, told in _VALUES.items()}
    found = {
        name: datasets.Json() if name in JSON_COLUMNS else value[form]
        for name, form in COLUMNS[kind].items()
    }
    if kind == STEPS:
        array = {name: value[form] for name, form in ARRAY.items()}
        found["arrays"] = datasets.List({**array, "shape": datasets.List(value["int"])})
    return datasets.Features(found)


def load(kind: str, files: Mapping[str, Sequence[str]], *, streaming: bool = False) -> Any:
    """The rows of the files of each format, one after the other."""
    told = features(kind)
    datasets = needed("datasets", INSTALL)
    loaded = [
        datasets.load_dataset(
            BUILDERS[form],
            data_files=list(names),
            features=told,
            split="train",
            streaming=streaming,
        )
        for form, names in files.items()
        if names
    ]
    if loaded:
        return datasets.concatenate_datasets(loaded)
    if streaming:
        return datasets.IterableDataset.from_generator(_nothing, features=told)
    return datasets.Dataset.from_dict({name: [] for name in told}, features=told)


def _nothing() -> Iterator[dict[str, Any]]:
    yield from ()
