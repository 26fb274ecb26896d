"""The arrays that samples' bytes are: types of numpy and PyTorch, and lengths that differ."""

from __future__ import annotations

import numpy as np
import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import UsageError
from tests.unit.adapters.torch.conftest import SHAPE, array

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    Jagged,
    Loader,
    SampleDataset,
    SampleViews,
    collate_jagged,
)
from dlfs.adapters.torch.samples import HOST  # noqa: E402
from tests.support.torch_processes import PROCESSES  # noqa: E402

pytestmark = pytest.mark.torch

COUNT = 24
DTYPES = [
    torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float32, torch.complex64, torch.int64,
    torch.bool, np.float64, "int16", "uint8",
]  # fmt: skip


def rows(number, dtype):
    """Sample ``number``: 0 to 4 rows of three elements, which are small numbers."""
    values = torch.arange(number % 5 * 3).reshape(-1, 3) + number
    return values.to(
        dtype if isinstance(dtype, torch.dtype) else getattr(torch, np.dtype(dtype).name)
    )


def to_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture(scope="module")
def volume(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("forms") / "volume.img")
    dlfs.format_volume(path, size_bytes=16 * MIB)
    with dlfs.open(path) as opened:
        for number, dtype in enumerate(DTYPES):
            with opened.writer(f"rows{number}") as writer:
                for sample in range(COUNT):
                    writer.add(b"%02d" % sample, to_bytes(rows(sample, dtype)))
        with opened.writer("described") as writer:
            for sample in range(COUNT):
                data = rows(sample, torch.int32).numpy()
                attributes = {"dlfs:dtype": "<i4", "dlfs:shape": f"{len(data)},3"}
                writer.add(b"%02d" % sample, data.tobytes(), attributes=attributes)
        yield opened


def expect(batch, samples, dtype):
    samples = list(samples)
    assert len(samples) == len(batch)
    for index, sample in zip(batch.indices.tolist(), samples, strict=True):
        expected = rows(index, dtype)
        assert (sample.dtype, sample.shape) == (expected.dtype, expected.shape)
        assert to_bytes(sample) == to_bytes(expected)


@pytest.mark.parametrize("number", range(len(DTYPES)))
def test_samples_of_any_type_and_length_one_behind_the_other(volume, number):
    dtype = DTYPES[number]
    with volume[f"rows{number}"] as dataset:
        options = {"dtype": dtype, "shape": (-1, 3)}
        for batch in Loader(dataset, 7, collate="jagged", **options):
            assert isinstance(batch.samples, Jagged)
            expect(batch, batch.samples, dtype)
        for batch in Loader(dataset, 7, collate="list", **options):
            assert isinstance(batch.samples, SampleViews)
            expect(batch, batch.samples, dtype)
        made = next(iter(Loader(dataset, 7, collate="jagged", transform=torch.clone, **options)))
        expect(made, made.samples, dtype)
        order = [14, 4, 9]
        assert [to_bytes(one) for one in SampleDataset(dataset, **options).__getitems__(order)] == [
            to_bytes(rows(index, dtype)) for index in order
        ]


def test_nested_and_padded(volume):
    with volume["rows0"] as dataset:
        loader = Loader(dataset, 5, dtype=torch.bfloat16, shape=(-1, 3), collate="jagged")
        batch = next(iter(loader))
        expect(batch, batch.samples.nested().unbind(), torch.bfloat16)
        assert batch.samples.padded().dtype == torch.bfloat16
        assert batch.samples.padded().shape[::2] == (5, 3)


def test_types_that_numpy_has_not_in_workers(volume):
    with volume["rows1"] as dataset:
        options = {"dtype": DTYPES[1], "shape": (-1, 3), "collate": "jagged"}
        loader = Loader(dataset, 7, num_workers=1, multiprocessing_context=PROCESSES, **options)
        for batch in loader:
            expect(batch, batch.samples, DTYPES[1])
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_arrays_that_the_dataset_describes(volume, workers):
    with volume["described"] as dataset:
        loader = Loader(dataset, 7, arrays=True, collate="jagged", num_workers=workers)
        for batch in loader:
            expect(batch, batch.samples, torch.int32)
        loader.close()
        over = DataLoader(
            SampleDataset(dataset, arrays=True), 8, num_workers=workers, collate_fn=collate_jagged
        )
        given = [sample.tolist() for batch in over for sample in batch]
        assert given == [rows(index, torch.int32).tolist() for index in range(COUNT)]


def test_one_dimension_of_any_length_is_the_default(volume):
    with volume["rows3"] as dataset:
        batch = next(iter(Loader(dataset, 9, dtype=torch.float32, collate="jagged")))
        assert batch.samples.values.dim() == 1
        for index, sample in zip(batch.indices.tolist(), batch.samples, strict=True):
            assert torch.equal(sample, rows(index, torch.float32).flatten())


def test_samples_of_one_shape(arrays):
    fixed = next(iter(Loader(arrays, 6, dtype=torch.float32, shape=SHAPE)))
    free = next(iter(Loader(arrays, 6, dtype=torch.float32, shape=(-1, 3))))
    assert torch.equal(free.samples, fixed.samples)
    halves = next(iter(Loader(arrays, 6, dtype=torch.bfloat16)))
    assert torch.equal(halves.samples.view(torch.float32), fixed.samples.reshape(6, -1))
    jagged = next(iter(Loader(arrays, 6, dtype="float32", shape=SHAPE, collate="jagged"))).samples
    assert jagged.offsets.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert np.array_equal(SampleDataset(arrays, dtype=torch.float32)[7].numpy(), array(7).ravel())


def test_a_batch_without_samples(volume):
    with volume["rows0"] as dataset:
        for shape in (None, (-1, 3), (2, 3)):
            loader = Loader(dataset, 5, dtype=torch.bfloat16, shape=shape, collate="jagged")
            with dataset.read([]) as batch:
                made = loader._recipe.gather(batch, HOST)
            assert (len(made), made.values.dtype) == (0, torch.bfloat16)
            with dataset.read([]) as batch:
                made = Loader(dataset, 5, dtype="int32", shape=shape)._recipe.gather(batch, HOST)
            assert len(made) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, r"or of PyTorch's such as torch\.bfloat16, got 'bfloat16'"),
        ({"dtype": ">f4"}, "got '>f4'"),
        ({"dtype": "U3"}, "got 'U3'"),
        ({"dtype": object()}, "got <object"),
        ({"dtype": "f4", "shape": (2, -1)}, r"or -1 in the first and 1 or more in the .*\(2, -1\)"),
        ({"dtype": "f4", "shape": (-2,)}, r"got \(-2,\)"),
        ({"dtype": "f4", "shape": (-1, 0)}, r"got \(-1, 0\)"),
        ({"shape": (2,)}, "expected a dtype with the shape"),
    ],
)
def test_types_and_shapes_that_are_none(arrays, options, message):
    with pytest.raises(UsageError, match=message):
        Loader(arrays, 4, **options)
    with pytest.raises(UsageError, match=message):
        SampleDataset(arrays, **options)


def test_lengths_that_do_not_fit(volume):
    with volume["rows0"] as dataset:
        for collate, shape, message in (
            ("jagged", (-1, 4), r"multiple of 8 bytes \(torch\.bfloat16 \(-1, 4\)\), got 6 bytes"),
            ("jagged", (2, 3), "stack a batch: expected samples of 12 bytes"),
            ("jagged", (), r"join a batch: expected samples of one dimension or more, got .*\(\)"),
            ("stack", (-1, 3), "stack a batch: expected samples of"),
        ):
            loader = Loader(dataset, COUNT, dtype=torch.bfloat16, shape=shape, collate=collate)
            with pytest.raises(UsageError, match=message):
                next(iter(loader))
