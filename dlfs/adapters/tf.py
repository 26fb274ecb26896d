"""TensorFlow: an epoch as a ``tf.data.Dataset``, and records parsed where DLFS has read them.

``batches`` gives what DLFS reads ahead as a ``tf.data.Dataset``. TensorFlow takes the batches
from a generator, one call for each, so a pipeline needs no ``shuffle`` and no ``batch`` of its own,
and ``prefetch`` only for what its own steps cost::

    data = batches(dataset, 256, dtype="uint8", shape=(28, 28), seed=7)
    model.fit(data.map(lambda index, images: (images, labels_of(index))), epochs=3)

Each iteration is an epoch with an order of its own: the first one ``epoch``, then those behind it.
Shapes and types are known to TensorFlow before anything is read. A sample that cannot be read ends
the iteration with TensorFlow's error, in whose text DLFS's own stands, unless ``on_error`` says
otherwise.

``example_parser`` is for loops that take DLFS's own batches: it parses the records of TFRecord
files by one compiled call for each batch, most of it without the interpreter's lock, so that other
threads go on. Where records are large this is much less work than a pipeline of ``tf.data``::

    parse = example_parser({"image": tf.io.FixedLenFeature([], tf.string)})
    for batch in dataset.batches(8, seed=7):
        with batch:
            images = parse(batch)["image"]

Threads: TensorFlow's; each iterator is used by one at a time, a parser by any number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import dlfs

if TYPE_CHECKING:
    import tensorflow
    from numpy.typing import ArrayLike, DTypeLike


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
    shuffle: dlfs.Shuffle | None = "global",
    where: ArrayLike | None = None,
    weights: str | ArrayLike | None = None,
    draws: int | None = None,
    order: ArrayLike | None = None,
    drop_last: bool = False,
    on_error: dlfs.OnError = "raise",
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
        where: ``bool[n_samples]`` or indices: the samples to take, each once.
        weights: ``[n_samples]`` or the name of a column: draw with replacement, in proportion.
        draws: samples of a weighted epoch; as many as there are to draw from by default.
        order: indices, taken as they stand in every epoch, such as ``range(len(dataset))``.
        drop_last: leave out a last batch that is not full: all are of one shape.
        on_error: ``raise``, ``skip`` or ``replace``.

    Returns:
        Pairs of the samples' indices, ``int64[n]``, and the samples, ``dtype[n, *shape]`` or
        ``string[n]``.

    Raises:
        UsageError: TensorFlow is not installed, or an argument is out of range.
    """
    tf = _load("read with tf.data")
    epochs = itertools.count(epoch)
    # Copies: every epoch is of the samples that were chosen now.
    chosen, ordered = (None if one is None else np.array(one) for one in (where, order))
    weighted = weights if weights is None or isinstance(weights, str) else np.array(weights)

    def begin(number: int) -> dlfs.Epoch:
        return dataset.batches(
            batch_size,
            seed=seed,
            epoch=number,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            where=chosen,
            weights=weighted,
            draws=draws,
            order=ordered,
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
    kind = tf.string if dtype is None else tf.as_dtype(np.dtype(dtype))
    signature = (
        tf.TensorSpec((count,), tf.int64),
        tf.TensorSpec((count, *(() if dtype is None else shape)), kind),
    )
    made = tf.data.Dataset.from_generator(generate, output_signature=signature)
    return made.apply(tf.data.experimental.assert_cardinality(batch_count))


def _samples(batch: dlfs.Batch, dtype: DTypeLike | None, shape: tuple[int, ...]) -> Any:
    """The samples of a batch as TensorFlow takes them."""
    if dtype is None:
        return np.array(batch.to_list(), object)
    return batch.stack(dtype, shape)


def example_parser(
    features: Mapping[str, Any],
) -> Callable[[Iterable[memoryview]], dict[str, tensorflow.Tensor]]:
    """Compile the parsing of samples that are ``tf.train.Example`` records.

    Args:
        features: which, and their types, as ``tf.io.parse_example`` has them.

    Returns:
        A function of samples, such as a ``Batch``; it gives each feature of all of them as one
        tensor. It is compiled by its first call. The tensors are copies: the samples' memory may
        go back to DLFS. TensorFlow's error ends a call where a sample is no such record.

    Raises:
        UsageError: TensorFlow is not installed.
    """
    tf = _load("parse Examples")
    wanted = dict(features)

    def parse(serialized: Any) -> Any:
        return tf.io.parse_example(serialized, wanted)

    text = tf.TensorSpec((None,), tf.string)
    compiled = tf.function(parse, input_signature=[text], autograph=False)

    def parse_samples(samples: Iterable[memoryview]) -> dict[str, tensorflow.Tensor]:
        serialized = [bytes(sample) for sample in samples]
        parsed: dict[str, tensorflow.Tensor] = compiled(
            tf.constant(serialized, tf.string, (len(serialized),))
        )
        return parsed

    return parse_samples


def _load(action: str) -> Any:
    """TensorFlow.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import tensorflow
    except ImportError as error:
        raise dlfs.UsageError(
            f"{action}: TensorFlow cannot be loaded ({error}); pip install tensorflow"
        ) from error
    return tensorflow
