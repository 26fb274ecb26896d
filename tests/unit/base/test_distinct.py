"""Distinct values: those of ``numpy.unique``, which reading does not call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dlfs
from dlfs.base.distinct import find_distinct, number_distinct
from dlfs.base.units import MIB

ARRAYS = st.one_of(
    hnp.arrays(st.sampled_from(["<i8", "<u8", "|b1", "<f8", "<f4"]), st.integers(0, 20)),
    hnp.arrays(np.int8, st.integers(0, 50), elements=st.integers(-3, 3)),
    st.lists(st.text(max_size=2)).map(lambda texts: np.array([*texts, None], object)[:-1]),
)


@given(ARRAYS)
def test_distinct_values_are_those_of_numpy(values: np.ndarray) -> None:
    expected, codes = np.unique(values, return_inverse=True)
    np.testing.assert_array_equal(find_distinct(values), expected)
    found, numbers = number_distinct(values)
    np.testing.assert_array_equal(found, expected)
    assert numbers.tolist() == codes.reshape(-1).tolist()
    assert found.dtype == values.dtype
    assert numbers.dtype == np.intp


SCRIPT = """
import sys
import numpy as np
import dlfs
volume = dlfs.open(sys.argv[1])
dataset = volume["d"]
view = dlfs.concat([dataset, dataset])
before = set(sys.modules)
dataset.paths(), dataset.get("2"), dataset[3], dataset.sample(4), dataset.info, volume.info()
dataset.column("kind"), dataset.column("number"), len(dataset), dataset.fields, repr(dataset)
dataset.read([1, 2]), dataset.read([1, 2], fields=["caption"]), view.read([1, 9])["caption"]
b"".join(dataset.read_pieces(3)), dataset.read_into(3, bytearray(9000))
for one in (dataset, view):
    for options in ({}, {"where": np.arange(5)}, {"shuffle": "chunk"}):
        for batch in one.batches(4, **options):
            batch["image"], batch["caption"]
list(dataset.batches(3, weights="number"))
volume.refresh()
dataset.close()
volume.close()
print(*sorted(set(sys.modules) - before))
"""


def test_reading_imports_nothing(tmp_path: Path) -> None:
    """A child would wait for ever for an import that a thread of its parent is in the middle of."""
    path = tmp_path / "volume.img"
    dlfs.format_volume(path, size_bytes=16 * MIB)
    with dlfs.open(path) as volume, volume.writer("d") as writer:
        for number in range(8):
            fields = {"image": bytes(5000 + number), "caption": "n"}
            attributes = {"number": number, "kind": "ab"[number % 2]}
            writer.add(str(number), fields, attributes=attributes)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, [], "")


@pytest.mark.parametrize("values", [np.empty(0, np.int64), np.empty(0, object)])
def test_no_values_have_no_distinct_ones(values: np.ndarray) -> None:
    assert len(find_distinct(values)) == 0
    assert [len(one) for one in number_distinct(values)] == [0, 0]
