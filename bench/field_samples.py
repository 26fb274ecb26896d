"""Data sets whose samples have named fields: their values, their volume, and their HDF5 files.

A sample has the types, shapes and lengths of a known kind of training data, and random elements:

- cosmoflow: four channels of particle counts on a cube, and four targets.
- unet3d: a scan of varying depth, and a mask of the same shape.
- caption: the bytes of an image, around 110 KiB, and a sentence.

The volume has each sample twice: with its fields, and as the same bytes without fields. HDF5 has
each sample twice as well: as its users store it, and as rows of contiguous datasets, which is the
fastest layout. Users have a file for each cube or scan, as CosmoFlow's data and pytorch-3dunet do,
and images of different lengths as elements of variable length.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dlfs
from bench.datasets import (
    DATASET,
    DatasetSpec,
    Scene,
    SyntheticSource,
    scene_of_volume,
    write_volume,
)
from bench.peers.hdf5 import write_rows
from bench.peers.packages import needed
from dlfs.base.units import MIB

PLAIN = "plain"
"""Name of the dataset that has the same bytes without fields."""
ROWS = "rows.h5"
"""Name of the HDF5 file with contiguous datasets: a sample is a row or a slice of each."""
ELEMENTS = "elements.h5"
"""Name of the HDF5 file with a dataset of elements of variable length for each field."""
SAMPLES_MIN = 32
"""Fewest samples of a data set; a small one has smaller cubes."""
TEXT = "caption"
"""Name of the only field of text."""
CAPTION_BYTES = 60

Values = dict[str, Any]
"""Value of each field of a sample: an array, bytes or a str."""


class FieldSource(SyntheticSource):
    """Samples with fields, the same for the same spec, size and seed.

    Attributes:
        fields: type of each field by name.
        has_files: True if users of HDF5 have a file for each sample.
    """

    fields: dict[str, str]
    has_files = True

    def values(self, index: int) -> Values:
        """Return the value of each field of a sample."""
        raise NotImplementedError


def join_values(values: Mapping[str, Any]) -> bytes:
    """Return the bytes of a sample: those of its fields, between which no source leaves a gap."""
    return b"".join(_as_array(value).tobytes() for value in values.values())


def _edge(full: int, total_bytes: int, element_bytes: int) -> int:
    """Return the edge of cubes: the full one, or one with which there are enough samples."""
    while full > 2 and SAMPLES_MIN * element_bytes * full**3 > total_bytes:
        full //= 2
    return full


class CosmoFlow(FieldSource):
    """Cubes of 2 MiB and their targets."""

    def _draw_lengths(
        self, spec: DatasetSpec, total_bytes: int, random: np.random.Generator
    ) -> NDArray[np.int64]:
        edge = self._edge = _edge(64, total_bytes, 8)
        self.fields = {"volume": f"<u2[4,{edge},{edge},{edge}]", "targets": "<f4[4]"}
        length = 8 * edge**3 + 16
        return np.full(max(SAMPLES_MIN, total_bytes // length), length, np.int64)

    def values(self, index: int) -> Values:
        data = np.frombuffer(self.data(index), np.uint8)
        cube = data[:-16].view("<u2").reshape((4, *[self._edge] * 3))
        return {"volume": cube, "targets": data[-16:].view("<f4")}


class UNet3D(FieldSource):
    """Scans of 5 to 15 MiB with their masks."""

    def _draw_lengths(
        self, spec: DatasetSpec, total_bytes: int, random: np.random.Generator
    ) -> NDArray[np.int64]:
        edge = self._edge = _edge(128, total_bytes, 5)
        self.fields = {"image": f"<f4[?,{edge},{edge}]", "mask": f"|u1[?,{edge},{edge}]"}
        count = max(SAMPLES_MIN, total_bytes // (5 * edge**3))
        depths = random.integers(edge // 2, edge * 3 // 2, count, endpoint=True)
        return depths * (5 * edge**2)

    def values(self, index: int) -> Values:
        data = np.frombuffer(self.data(index), np.uint8)
        end, shape = len(data) // 5 * 4, (-1, self._edge, self._edge)
        return {"image": data[:end].view("<f4").reshape(shape), "mask": data[end:].reshape(shape)}


class Captions(FieldSource):
    """Images and their captions."""

    has_files = False

    def __init__(self, spec: DatasetSpec, total_bytes: int, seed: int) -> None:
        super().__init__(spec, total_bytes, seed)
        self.fields = {"image": "bytes", TEXT: "text"}

    def data(self, index: int) -> bytes:
        sentence = b"two dogs on the red sofa near an open window, number %d" % index
        return super().data(index)[:-CAPTION_BYTES] + sentence.ljust(CAPTION_BYTES, b".")

    def values(self, index: int) -> Values:
        data = self.data(index)
        return {"image": data[:-CAPTION_BYTES], TEXT: data[-CAPTION_BYTES:].decode()}


SOURCES: dict[str, type[FieldSource]] = {
    "cosmoflow": CosmoFlow,
    "unet3d": UNet3D,
    "caption": Captions,
}
"""Source of each data set with fields, by its key."""


def field_scene(spec: DatasetSpec, root: Path, total_bytes: int, seed: int) -> Scene:
    """Lay a data set with fields out below a folder, or reuse the same one from an earlier run."""
    wanted = {**asdict(spec), "total_bytes": total_bytes, "seed": seed}
    folder = root / f"scene-{spec.key}"
    volume, files, stamp = folder / "volume.img", folder / "files", folder / "stamp.json"
    source = SOURCES[spec.key](spec, total_bytes, seed)
    if not (stamp.exists() and json.loads(stamp.read_text()) == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write_both(source, volume)
        if source.has_files:
            _write_files(source, files)
        else:
            _write_elements(source, folder / ELEMENTS)
        _write_rows(source, folder / ROWS)
        stamp.write_text(json.dumps(wanted), encoding="utf-8")
    every = np.arange(len(source))
    return scene_of_volume(spec, source, folder, volume, every, seed, files=files)


# ---- writing -------------------------------------------------------------------------------------


def _write_both(source: FieldSource, volume: Path) -> None:
    """Write a volume with the samples, and with the same bytes without fields."""
    count, total = len(source), source.total_bytes()
    dlfs.format_volume(str(volume), size_bytes=(5 * total // 2 + 128 * MIB) // MIB * MIB)
    with (
        dlfs.open(str(volume)) as opened,
        opened.writer(
            DATASET, expected_bytes=total, expected_samples=count, fields=source.fields
        ) as writer,
    ):
        for index in range(count):
            writer.add(source.path(index), source.values(index))
    write_volume(str(volume), source, PLAIN)


def _write_files(source: FieldSource, root: Path) -> None:
    """Write an HDF5 file for each sample, with a dataset for each field."""
    for index in range(len(source)):
        path = root / os.fsdecode(source.path(index))
        path.parent.mkdir(parents=True, exist_ok=True)
        with needed("h5py").File(path, "w", libver="latest") as file:
            for name, value in source.values(index).items():
                file[name] = value


def _write_elements(source: FieldSource, path: Path) -> None:
    """Write an HDF5 file with a dataset for each field: an element of bytes or text a sample."""
    h5py = needed("h5py")
    kinds = {"bytes": h5py.vlen_dtype(np.uint8), "text": h5py.string_dtype()}
    with h5py.File(path, "w", libver="latest") as file:
        for name, kind in source.fields.items():
            file.create_dataset(name, len(source), kinds[kind])
        for index in range(len(source)):
            for name, value in source.values(index).items():
                file[name][index] = value if isinstance(value, str) else _as_array(value)


def _write_rows(source: FieldSource, path: Path) -> None:
    """Write an HDF5 file with a contiguous dataset for each field."""
    every = range(len(source))
    with needed("h5py").File(path, "w", libver="latest") as file:
        for name in source.fields:
            lengths = np.array([len(_as_array(source.values(at)[name])) for at in every])
            arrays = (_as_array(source.values(at)[name]) for at in every)
            first = _as_array(source.values(0)[name])
            write_rows(file, name, first.dtype, lengths, arrays, first.shape[1:])


def _as_array(value: Any) -> NDArray[Any]:
    data = value.encode() if isinstance(value, str) else value
    return np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.asarray(data)
