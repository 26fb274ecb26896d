"""Writes shards of records: MDS after its layout, since its writer needs PyTorch, and TFRecord."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from tfrecord import TFRecordWriter


def encode_mds(sizes: Sequence[int | None], rows: Sequence[Sequence[bytes]]) -> bytes:
    """Return a shard of rows, with the length of each value whose column has no size.

    Source: MosaicML's dataset format.
    """
    encoded = []
    for values in rows:
        pairs = zip(values, sizes, strict=True)
        lengths = [len(value) for value, size in pairs if size is None]
        encoded.append(np.array(lengths, "<u4").tobytes() + b"".join(values))
    config = b"{}"
    ends = np.cumsum([0, *map(len, encoded)]) + 4 * (len(rows) + 2) + len(config)
    return np.array([len(rows), *ends], "<u4").tobytes() + config + b"".join(encoded)


def write_mds(
    folder: Path,
    columns: Mapping[str, tuple[str, int | None]],
    rows: Sequence[Sequence[bytes]],
    *,
    shard_rows: int | None = None,
) -> Path:
    """Write shards and their index to a folder, and return it.

    Args:
        folder: an existing folder.
        columns: encoding of each column, and the size of its values, if all have one.
        rows: encoded values.
        shard_rows: most rows of a shard; None: all are in one, ``shard.mds``.
    """
    sizes = [size for _, size in columns.values()]
    shards = []
    for first in range(0, len(rows), shard_rows or len(rows)):
        name = "shard.mds" if shard_rows is None else f"shard.{first:05d}.mds"
        some = rows[first : first + (shard_rows or len(rows))]
        data = encode_mds(sizes, some)
        (folder / name).write_bytes(data)
        shards.append(
            {
                "column_encodings": [encoding for encoding, _ in columns.values()],
                "column_names": list(columns),
                "column_sizes": sizes,
                "compression": None,
                "format": "mds",
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(some),
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def write_examples(
    path: Path,
    examples: Iterable[Mapping[str, Any]],
    sequences: Iterable[Mapping[str, Any] | None] = repeat(None),
) -> Path:
    """Write Examples to a TFRecord file, and return its path.

    Args:
        path: path of the file.
        examples: features of each: values and ``byte``, ``int`` or ``float``.
        sequences: lists of steps of each, likewise; None: it is no SequenceExample.
    """
    writer = TFRecordWriter(str(path))
    for features, steps in zip(examples, sequences, strict=False):
        writer.write(features, steps)
    writer.close()
    return path
