"""Batches as Arrow arrays, and as padded arrays of NumPy."""

from __future__ import annotations

import gc
import re
import sys

import numpy as np
import pytest

from dlfs.base.extras import install_command
from dlfs.errors import ClosedError, LimitError, UsageError
from dlfs.reader import arrow
from tests.support.datasets import random_samples

pa = pytest.importorskip("pyarrow")


@pytest.fixture
def mixed() -> dict[bytes, bytes]:
    """Samples of 0..13 bytes, about the longest that a view has in itself, and longer ones."""
    short = {b"short/%03d" % n: bytes(range(n, n + n % 14)) for n in range(60)}
    return {**short, **random_samples(100, low=13, high=40_000)}


@pytest.mark.parametrize("window_bytes", [512, 1 << 30])
def test_an_arrow_array_of_a_batch(bench, mixed, monkeypatch, window_bytes):
    monkeypatch.setattr(arrow, "WINDOW_BYTES", window_bytes)
    made = bench(mixed)
    with made.reader() as reader:
        order = np.random.default_rng(1).permutation(len(mixed))
        array = reader.read(order).to_arrow()
        array.validate(full=True)
        assert array.type == pa.binary_view()
        assert array.to_pylist() == [made.laid.samples[i] for i in order]
        assert array.cast(pa.large_binary()).to_pylist() == array.to_pylist()
        assert len(reader.read([]).to_arrow()) == 0


def test_arrow_arrays_are_not_copies_and_keep_the_batch(bench, mixed):
    made = bench(mixed)
    with made.reader() as reader:
        with reader.read(range(len(mixed))) as batch:
            array = batch.to_arrow()
            shared = array.buffers()[2]
            assert (shared.address, shared.size) == (batch.data.ctypes.data, batch.data.nbytes)
            assert not shared.is_mutable
        with pytest.raises(ClosedError):
            batch.to_arrow()
        part = array[100:110]
        del array, batch, shared
        gc.collect()
        for start in range(0, len(mixed), 10):  # what would overwrite memory that is free
            reader.read(range(start, start + 10))
        assert part.to_pylist() == list(made.laid.samples[100:110])


def test_failed_samples_are_null_or_left_out(bench, mixed):
    lengths = np.array([3, -1, 20, -1])
    array = arrow.binary_views(memoryview(bytes(range(40))), np.array([1, 0, 10, 0]), lengths)
    array.validate(full=True)
    assert array.to_pylist() == [b"\1\2\3", None, bytes(range(10, 30)), None]
    made = bench(mixed)
    made.corrupt(30)
    with made.reader() as reader:
        batch = reader.read([29, 30, 31], on_error="skip")
        expected = [made.laid.samples[29], made.laid.samples[31]]
        assert batch.to_arrow().to_pylist() == expected
        assert [
            bytes(row)[:n] for row, n in zip(batch.pad(), batch.lengths, strict=True)
        ] == expected


def test_batches_that_arrow_cannot_express_are_refused(monkeypatch):
    with pytest.raises(LimitError, match=r"at most 2147483647 bytes, got one of 2147483648"):
        arrow.binary_views(memoryview(b""), np.array([0]), np.array([1 << 31]))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=re.escape(install_command("arrow"))):
        arrow.binary_views(memoryview(b""), np.array([0]), np.array([0]))


def test_padded_rows(bench):
    made = bench({b"%03d" % n: bytes([n + 1] * n) for n in range(50)})
    with made.reader() as reader:
        batch = reader.read([7, 0, 30])
        padded = batch.pad()
        assert padded.shape == (3, 30)
        assert padded[0].tolist() == [8] * 7 + [0] * 23
        wider = batch.pad(32, fill=255)
        assert wider[1].tolist() == [255] * 32
        assert wider[2].tolist() == [31] * 30 + [255] * 2
        assert reader.read([]).pad(5).shape == (0, 5)
        for wrong in ((29, 0), (32, 256), (32, -1)):
            with pytest.raises(UsageError, match="rows of 30 bytes or more"):
                batch.pad(*wrong)
