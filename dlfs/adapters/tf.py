"""An epoch of a dataset as a ``tf.data.Dataset``, in batches that DLFS reads ahead.

TensorFlow takes the batches from a generator, one call for each, so a pipeline needs no ``shuffle``
and no ``batch`` of its own, and ``prefetch`` only for what its own steps cost::

    data = batches(dataset, 256, dtype="uint8", shape=(28, 28), seed=7)
    model.fit(data.map(lambda index, images: (images, labels_of(index))), epochs=3)

Each iteration is an epoch with an order of its own: the first one ``epoch``, then those behind it.
Shapes and types are known to TensorFlow before anything is read. A sample that cannot be read ends
the iteration with TensorFlow's error, in whose text DLFS's own stands, unless ``on_error`` says
otherwise.

Threads: TensorFlow's; each iterator is used by one at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

import dlfs

if TYPE_CHECKING:
    import tensorflow
    from numpy.typing import DTypeLike


def batches(
    dataset: dlfs.Dataset,
    batch_size: int,
    *,
    dtype: DTypeLike | None = None,
    shape: tuple[int, ...] = (),
    seed: int = 0,
    epoch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    shuffle: str | None = "global",
    drop_last: bool = False,
    on_error: str = "raise",
) -> tensorflow.data.Dataset:
    """One rank's batches of an epoch.

    Args:
        dataset: that is read; it must stay open while it is iterated.
        batch_size: samples in a batch, 1 and up; the last one may be smaller.
        dtype: of the elements of a sample; by default a sample is one byte string.
        shape: of a sample with a dtype.
        seed: of the order.
        epoch: of the first iteration; each one after it is the next epoch.
        rank: 0..world_size-1.
        world_size: ranks that share the epoch's samples.
        shuffle: ``global``, ``chunk`` or None, as ``Dataset.batches`` has it.
        drop_last: leave out a last batch that is not full: all are of one shape.
        on_error: ``raise``, ``skip`` or ``replace``.

    Returns:
        Pairs of the samples' indices, ``int64[n]``, and the samples, ``dtype[n, *shape]`` or
        ``string[n]``.

    Raises:
        UsageError: TensorFlow is not installed, or an argument is out of range.
    """
    try:
        import tensorflow
    except ImportError as error:
        raise dlfs.UsageError(
            f"read with tf.data: it cannot be loaded ({error}); pip install tensorflow"
        ) from error
    epochs = itertools.count(epoch)

    def begin(number: int) -> dlfs.Epoch:
        return dataset.batches(
            batch_size,
            seed=seed,
            epoch=number,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            drop_last=drop_last,
            on_error=on_error,
        )

    def generate() -> Iterator[tuple[Any, Any]]:
        with begin(next(epochs)) as taken:
            for batch in taken:
                yield batch.indices.astype(np.int64), _samples(batch, dtype, shape)

    with begin(epoch) as first:  # whatever is wrong with the arguments is told here
        batch_count = len(first)
    count = batch_size if drop_last and on_error != "skip" else None
    kind = tensorflow.string if dtype is None else tensorflow.as_dtype(np.dtype(dtype))
    signature = (
        tensorflow.TensorSpec((count,), tensorflow.int64),
        tensorflow.TensorSpec((count, *(() if dtype is None else shape)), kind),
    )
    made = tensorflow.data.Dataset.from_generator(generate, output_signature=signature)
    return made.apply(tensorflow.data.experimental.assert_cardinality(batch_count))


def _samples(batch: dlfs.Batch, dtype: DTypeLike | None, shape: tuple[int, ...]) -> Any:
    """The samples of a batch as TensorFlow takes them."""
    if dtype is None:
        return np.array(batch.to_list(), object)
    return batch.stack(dtype, shape)
