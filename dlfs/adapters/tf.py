"""TensorFlow: an epoch as a ``tf.data.Dataset``, and a parser for ``tf.train.Example`` samples.

``batches`` returns a ``tf.data.Dataset`` of the batches that DLFS reads ahead. TensorFlow takes
them from a generator, one call for each batch. A pipeline therefore needs no ``shuffle`` and no
``batch``, and ``prefetch`` only for its own steps::

    data = batches(dataset, 256, dtype="uint8", shape=(28, 28), seed=7)
    model.fit(data.map(lambda index, images: (images, labels_of(index))), epochs=3)

Each iteration is one epoch with an order of its own: first ``epoch``, then the epochs after it.
Shapes and types are known before anything is read. With ``with_state=True`` each batch carries the
state of the epoch behind it; ``state`` resumes from it, at any world size. A sample that cannot be
read ends the iteration with TensorFlow's error, which contains the text of DLFS's error, unless
``on_error`` says otherwise.

``example_parser`` is for loops over DLFS's own batches. It parses the records of TFRecord files by
one compiled call for each batch, which runs mostly without the interpreter's lock. For large
records this takes much less time than a ``tf.data`` pipeline::

    parse = example_parser({"image": tf.io.FixedLenFeature([], tf.string)})
    for batch in dataset.batches(8, seed=7):
        with batch:
            images = parse(batch)["image"]

Threads: TensorFlow's. One thread at a time uses an iterator; any number use a parser.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

import dlfs
from dlfs.epoch.options import EpochOptions, EpochState, ReadKeywords, make_options

if TYPE_CHECKING:
    import tensorflow
    from numpy.typing import DTypeLike


def batches(
    dataset: dlfs.Dataset,
    batch_size: int,
    *,
    dtype: DTypeLike | None = None,
    shape: tuple[int, ...] = (),
    epoch: int = 0,
    state: dict[str, Any] | None = None,
    with_state: bool = False,
    **keywords: Unpack[ReadKeywords],
) -> tensorflow.data.Dataset:
    """Return one rank's batches of an epoch.

    With ``drop_last``, all batches have one shape.

    Args:
        dataset: dataset to read from; it must stay open during iterations.
        batch_size: samples in a batch, >= 1; the last batch may be smaller.
        dtype: element type of a sample; by default a sample is one byte string.
        shape: shape of a sample with a dtype.
        epoch: epoch of the first iteration; each later iteration is the next epoch.
        state: state to resume from: the first iteration gives the batches behind it. It replaces
            ``seed``, ``epoch``, ``shuffle`` and ``window_chunks``.
        with_state: give the state behind each batch as a third component, a scalar string of JSON:
            ``json.loads(value.numpy())`` is a ``state``.
        keywords: seed, order, share and policy, as ``Dataset.batches`` takes them: ``seed``,
            ``shuffle``, ``window_chunks``, ``where``, ``weights``, ``draws``, ``order``, ``rank``,
            ``world_size``, ``placement``, ``drop_last``, ``on_error`` and ``plan``.

    Returns:
        Pairs of the samples' indices, ``int64[n]``, and the samples, ``dtype[n, *shape]`` or
        ``string[n]``; with the state if asked for.

    Raises:
        UsageError: TensorFlow is not installed, an argument is out of range, or the state is of
            another dataset or selection.
    """
    tf = _load("read with tf.data")
    options = make_options(batches, ReadKeywords, keywords, batch_size=batch_size, epoch=epoch)
    options = options.with_copies()  # the caller may change its arrays before a later epoch
    start_epoch = _epoch_starter(dataset, options, state)

    def generate() -> Iterator[tuple[Any, ...]]:
        with start_epoch() as taken:
            for batch in taken:
                given = (batch.indices.astype(np.int64), _samples(batch, dtype, shape))
                yield (*given, json.dumps(taken.state())) if with_state else given

    with _epoch_starter(dataset, options, state)() as first:  # raises for wrong arguments
        batch_count = len(first)
    count = batch_size if options.drop_last and options.on_error != "skip" else None
    kind = tf.string if dtype is None else tf.as_dtype(np.dtype(dtype))
    signature: tuple[Any, ...] = (
        tf.TensorSpec((count,), tf.int64),
        tf.TensorSpec((count, *(() if dtype is None else shape)), kind),
    )
    if with_state:
        signature = (*signature, tf.TensorSpec((), tf.string))
    made = tf.data.Dataset.from_generator(generate, output_signature=signature)
    if state is not None:  # the first epoch may have fewer batches than the later ones
        return made
    return made.apply(tf.data.experimental.assert_cardinality(batch_count))


def _epoch_starter(
    dataset: dlfs.Dataset, options: EpochOptions, state: dict[str, Any] | None
) -> Callable[[], dlfs.Epoch]:
    """Return a function that starts the next epoch; the first is the rest of that of a state.

    Any threads may call the function. After an epoch that could not be started comes the next one.

    Raises:
        UsageError: the options do not fit the dataset, or the state does not fit either.
    """
    resumed: dict[str, Any] = {}  # state of the first epoch, if any of it is left
    if state is not None:
        options = options.at(EpochState.from_dict(state))
        first_rank = dataset.start_epoch(replace(options.placed(), rank=0)).resume(state)
        if len(first_rank) or not state["position"]:
            resumed = dict(state)
        else:  # the epoch has ended for all ranks
            options = replace(options, epoch=options.epoch + 1)
    numbers = itertools.count(options.epoch)

    def start() -> dlfs.Epoch:
        number = next(numbers)
        epoch = dataset.start_epoch(replace(options, epoch=number))
        return epoch.resume(resumed) if resumed and number == options.epoch else epoch

    return start


def _samples(batch: dlfs.Batch, dtype: DTypeLike | None, shape: tuple[int, ...]) -> Any:
    """Return the samples of a batch as values that TensorFlow accepts."""
    if dtype is None:
        return np.array(batch.to_list(), object)
    return batch.stack(dtype, shape)


def example_parser(
    features: Mapping[str, Any],
) -> Callable[[Iterable[memoryview]], dict[str, tensorflow.Tensor]]:
    """Compile a parser for samples that are ``tf.train.Example`` records.

    Args:
        features: features to parse and their types, as for ``tf.io.parse_example``.

    Returns:
        A function of samples, such as a ``Batch``, that returns one tensor for each feature. Its
        first call compiles it. The tensors are copies, so the batch may be released. A sample that
        is no such record raises TensorFlow's error.

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
    """Import TensorFlow.

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
