"""Columns of vectors: written, read, appended, copied, compared, and in tables and views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.attributes import AttributesBuilder, AttributeTable
from dlfs.attributes.vectors import component_column, find_vectors
from dlfs.base.units import MIB
from dlfs.errors import NotFoundError, UsageError
from dlfs.format.attributes import ColumnForm
from dlfs.ingest.export.targets import export_dataset
from dlfs.ingest.importer import import_dataset, open_source
from tests.support.volumes import new_volume

COUNT = 12
TARGETS = np.arange(4 * COUNT, dtype=np.float32).reshape(COUNT, 4) / 8


def test_a_vector_with_a_reserved_name_is_none() -> None:
    """Media may have such components; fields expect single values in reserved columns."""
    names = ["a", "dlfs:field:x:crc32c", "dlfs:dtype"]
    components = [ColumnForm(component_column(name, 0), "uint32") for name in names]
    assert find_vectors(components) == {"a": ["dlfs:vector:a:0"]}


@pytest.fixture
def volume(tmp_path: Path) -> Any:
    with dlfs.open(new_volume(tmp_path / "volume.img", size_bytes=32 * MIB)) as opened:
        with opened.writer("a") as writer:
            for number in range(COUNT):
                given = {"targets": TARGETS[number], "box": [number, -number], "label": number % 3}
                writer.add(f"{number:02}", bytes([number]), attributes=given)
        yield opened


def check(dataset: dlfs.Dataset | dlfs.DatasetView) -> None:
    columns = dataset.columns
    assert list(columns) == ["targets", "box", "label"]
    assert (columns["targets"].base, columns["targets"].shape) == (np.float32, (4,))
    assert np.array_equal(dataset.column("targets"), TARGETS)
    assert dataset.column("targets").dtype == np.float32
    assert dataset.column("targets", [3, 1]).tolist() == TARGETS[[3, 1]].tolist()
    assert dataset.column("box", [2]).tolist() == [[2, -2]]


def test_vectors_are_columns(volume: dlfs.Volume) -> None:
    with volume["a"] as dataset:
        check(dataset)
        assert "targets" in dataset.attributes
        assert "dlfs:vector:targets:0" in dataset.attributes  # for readers that know no vectors
        assert not dataset.column("targets").flags.writeable
        with pytest.raises(NotFoundError, match="there are: 'targets', 'box' and 'label'"):
            dataset.column("target")
        for batch in dataset.batches(4, where=dataset.column("targets")[:, 0] > 2):
            assert (dataset.column("targets", batch.indices)[:, 0] > 2).all()
        with pytest.raises(UsageError, match=r"where as a mask of 12 samples.*\(12, 4\)"):
            dataset.batches(4, where=dataset.column("targets") > 2)
        with pytest.raises(UsageError, match=r"expected 12 numbers as weights.*\(12, 4\)"):
            dataset.batches(4, weights="targets")
        with pytest.raises(UsageError, match="column 'box': expected single values, got vectors"):
            dlfs.split(dataset, 0.5, by="attribute", column="box")


def test_samples_without_a_vector_have_the_declared_one(volume: dlfs.Volume) -> None:
    with volume.writer("b", defaults={"x": [np.nan] * 2, "y": [False, True]}) as writer:
        writer.add("a", b"")
        writer.add("b", b"", attributes={"x": [1.5, 2.5], "y": [True, True]})
        writer.add("c", b"")
    with volume["b"] as dataset:
        assert np.array_equal(dataset.column("x")[1], [1.5, 2.5])
        assert np.isnan(dataset.column("x")[[0, 2]]).all()
        assert dataset.column("y").tolist() == [[False, True], [True] * 2, [False, True]]


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ([[1, 2]], [[1, 2, 3]], "expected vectors of 2, got vectors of 3"),
        ([[1, 2]], [1], "expected vectors of 2, got single values"),
        ([1], [[1]], "expected single values, got vectors of 1"),
        ([[1, 2]], [[1, 0.5]], "expected int64, got float64 0.5"),
        ([[1, 2]], [["a", "b"]], "vectors of bools or numbers"),
        ([[1, 2]], [[1], [2, 3]], "values of one form"),
    ],
)
def test_vectors_of_another_form_are_refused(first: Any, then: Any, message: str) -> None:
    builder = AttributesBuilder()
    builder.append(builder.prepare({"x": first}, 1), 0)
    with pytest.raises(UsageError, match=f"add attribute 'x.*{message}"):
        builder.prepare({"x": then}, 1)
    with pytest.raises(UsageError, match="expected one of"):
        builder.prepare({"dlfs:vector:y:0": [1]}, 1)


def test_incomplete_vectors_are_single_columns(volume: dlfs.Volume) -> None:
    builder = AttributesBuilder()
    builder.append(builder.prepare({"x": [[1, 2]], "y": [[1.5, 2.5]]}, 1), 0)
    del builder._columns["dlfs:vector:x:0"]
    with volume["a"] as dataset:
        parts = builder.freeze(dataset.uuid, np.zeros(1, np.int64))
    table = AttributeTable.over(np.concatenate(parts), len(parts[0]))
    assert list(table.dtypes) == ["dlfs:vector:x:1", "y"]
    assert table.column("dlfs:vector:x:1").tolist() == [2]
    table.verify()


def test_versions_copies_and_views_have_vectors(volume: dlfs.Volume) -> None:
    with volume.append("a") as writer:
        given = {"targets": np.ones(4, np.float32), "box": [0, 0], "label": 0}
        writer.add("new", b"new", attributes=given)
    with volume["a@1"] as old, volume["a"] as new:
        assert np.array_equal(new.column("targets")[:COUNT], TARGETS)
        assert new.column("targets")[COUNT].tolist() == [1] * 4
        dlfs.copy_dataset(old, volume, "copy")
        with volume["copy"] as copied:
            check(copied)
            assert not dlfs.diff(old, copied)
            view = dlfs.concat([old, copied])
            assert np.array_equal(view.column("targets"), np.concatenate([TARGETS] * 2))
    with volume.writer("changed") as writer:
        for number in range(COUNT):
            values = TARGETS[number] + (number == 5)
            given = {"targets": values, "box": [number, -number], "label": number % 3}
            writer.add(f"{number:02}", bytes([number]), attributes=given)
    with volume["a@1"] as old, volume["changed"] as changed:
        difference = dlfs.diff(old, changed)
        assert difference.columns_changed == {"targets": 1}
        assert difference.attributes_changed.tolist() == [5]


def test_tables_have_vectors(volume: dlfs.Volume, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with volume["a"] as dataset:
        table = dataset.attributes_to_arrow()
        assert table.column("targets").to_pylist() == TARGETS.tolist()
        made = tmp_path / "a.parquet"
        export_dataset(dataset, made)
    import_dataset(volume, open_source(made), "again")
    with volume["again"] as again:
        check(again)
