"""Whatever a dataset has, a copy has it too; and a comparison finds exactly what differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import MemoryDevice
from tests.property.test_attributes import VALUES
from tests.property.test_volume_model import PATHS, without_clashes

NAMES = ("score", "label")
KINDS = ("bool", "int16", "float32", "float64", "text")
BYTES = st.builds(lambda size, byte: bytes([byte]) * size, st.integers(0, 9000), st.integers(0, 3))
DATASETS = st.dictionaries(PATHS, BYTES, max_size=12).map(without_clashes)

Model = tuple[dict[bytes, bytes], dict[str, Any]]
"""Samples by path, and the values of each column in path order."""


@pytest.fixture(scope="module")
def volumes() -> Iterator[tuple[dlfs.Volume, dlfs.Volume]]:
    """Two volumes of different shapes."""
    names = [f"copies-{uuid4().hex}" for _ in range(3)]
    uris = [f"mem:{name}?size={4 * MIB}" for name in names]
    dlfs.format_volume(uris[0], chunk_bytes=4 * KIB, block_bytes=512)
    dlfs.format_volume(uris[1:], chunk_bytes=16 * KIB, replicas=2)
    with dlfs.open(uris[0]) as first, dlfs.open(uris[1:]) as second:
        yield first, second
    for name in names:
        MemoryDevice.forget(name)


@st.composite
def models(draw: st.DrawFn) -> Model:
    samples = dict(sorted(draw(DATASETS).items()))
    return samples, draw_columns(draw, len(samples))


def draw_columns(draw: st.DrawFn, count: int) -> dict[str, Any]:
    columns = {}
    for name in NAMES:
        if draw(st.booleans()):
            kind = draw(st.sampled_from(KINDS))
            values = draw(st.lists(VALUES[kind], min_size=count, max_size=count))
            columns[name] = np.array(values, object if kind == "text" else kind)
    return columns


def write(volume: dlfs.Volume, model: Model, layout: Any) -> None:
    samples, columns = model
    lengths = np.array([len(data) for data in samples.values()], np.int64)
    with volume.writer("d", layout=layout, seed=3) as writer:
        writer.add_batch(
            list(samples),
            b"".join(samples.values()),
            np.cumsum(lengths) - lengths,
            lengths,
            attributes=columns,
        )


def same(a: Any, b: Any) -> Any:
    """Return for each pair of values whether they are equal, or both NaN."""
    both_nan = np.array([x != x and y != y for x, y in zip(a, b, strict=True)], bool)
    return np.array([x == y for x, y in zip(a, b, strict=True)], bool) | both_nan


@settings(max_examples=12)
@given(models(), st.sampled_from(["path", "shuffled"]))
def test_a_copy_differs_in_nothing(
    volumes: tuple[dlfs.Volume, dlfs.Volume], model: Model, layout: str
) -> None:
    source, target = volumes
    write(source, model, layout)
    try:
        with source["d"] as original:
            info = dlfs.copy_dataset(original, target, "copy")
            with target["copy"] as copy:
                assert not dlfs.diff(original, copy)
                assert not dlfs.diff(copy, original)
                assert dict(zip(copy.paths(), copy[:].to_list(), strict=True)) == model[0]
                assert copy.columns == original.columns
                assert list(copy.columns) == list(original.columns)
                for name, values in model[1].items():
                    assert same(copy.column(name), values).all()
                assert (info.layout, info.seed) == (layout, 3)
                if layout == "path":
                    order = original.directory.order().tolist()
                    assert copy.directory.order().tolist() == order
    finally:
        source.remove("d")
        target.remove("copy")


@settings(max_examples=20)
@given(models(), st.data())
def test_a_comparison_finds_what_differs(
    volumes: tuple[dlfs.Volume, dlfs.Volume], old: Model, data: st.DataObject
) -> None:
    edited = without_clashes(
        {path: data.draw(st.just(value) | BYTES) for path, value in old[0].items()}
        | data.draw(DATASETS)
    )
    for path in list(edited):
        if data.draw(st.integers(0, 3)) == 0:
            del edited[path]
    samples = dict(sorted(edited.items()))
    columns: dict[str, Any] = {}
    for name, values in old[1].items():
        dtype = values.dtype
        kind = "text" if dtype.kind == "O" else dtype.name
        before = dict(zip(old[0], values, strict=True))
        drawn = [
            before[path] if path in before and data.draw(st.booleans()) else data.draw(VALUES[kind])
            for path in samples
        ]
        columns[name] = np.array(drawn, dtype)
    columns |= data.draw(
        st.just({}) | st.builds(lambda n: {"new": np.zeros(n)}, st.just(len(samples)))
    )
    new: Model = (samples, columns)
    source, target = volumes
    write(source, old, "path")
    write(target, new, "shuffled")
    try:
        with source["d"] as a, target["d"] as b:
            compare(dlfs.diff(a, b), old, new)
    finally:
        source.remove("d")
        target.remove("d")


def compare(found: dlfs.DatasetDiff, old: Model, new: Model) -> None:
    """Check a comparison against the models."""
    paths, now = list(old[0]), list(new[0])
    both = [path for path in paths if path in new[0]]
    changed = {path for path in both if old[0][path] != new[0][path]}
    labelled: set[bytes] = set()
    counts = {}
    common = [n for n in old[1] if n in new[1] and old[1][n].dtype == new[1][n].dtype]
    for name in common:
        mine = [old[1][name][paths.index(path)] for path in both]
        yours = [new[1][name][now.index(path)] for path in both]
        differs = ~same(mine, yours)
        labelled |= {path for path, is_other in zip(both, differs, strict=True) if is_other}
        counts[name] = int(differs.sum())
    assert [now[i] for i in found.added] == [path for path in now if path not in old[0]]
    assert [paths[i] for i in found.removed] == [path for path in paths if path not in new[0]]
    assert {paths[i] for i in found.changed} == changed
    assert {paths[i] for i in found.attributes_changed} == labelled - changed
    assert found.same_count == len(both) - len(changed | labelled)
    assert found.columns_changed == {name: count for name, count in counts.items() if count}
    assert set(found.columns_added) == set(new[1]) - set(old[1])
    assert set(found.columns_removed) == set(old[1]) - set(new[1])
    samples_differ = old[0] != new[0] or bool(labelled)
    assert bool(found) == (samples_differ or set(old[1]) != set(new[1]))
