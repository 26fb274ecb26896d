"""``TokenSequences``: documents of tokens, packed one after the other into sequences of one length.

The samples of a dataset are documents: arrays of tokens of one type. In the order of an epoch they
are one long line of tokens, and sequence s has the tokens from s * length on. So the sequences do
not depend on the number of ranks, and the number of a sequence is all that a state must have.
With ``field=``, a document is a field of a sample, and only that field is read.

``_TokenLine`` finds the documents of a sequence: it has the token count before every block of
documents of the order. A document is read once by each rank that has a part of it, and its last
part is kept for the next sequence.

Threads: one at a time for an epoch. Memory: 8 bytes for each block of documents, the segments of
``ListStream``, and the documents of a batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dlfs._native.reader import StreamOptions
from dlfs.base.arguments import OnError, check_integer
from dlfs.base.wording import quote, show_value
from dlfs.epoch.options import EpochKeywords, EpochOptions, make_options
from dlfs.epoch.selection import Selection
from dlfs.errors import UsageError
from dlfs.fields import FieldType
from dlfs.reader import Epoch, EpochReader, SampleFailure, follow, pick_fields
from dlfs.views.lists import LastOrder, ListStream, Readable, digest_order, open_reader

BLOCK_DOCUMENTS = 1 << 12
"""Documents of the order for which one token count is stored."""


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Sequences of tokens.

    Attributes:
        tokens: the tokens, ``dtype[n, length]``.
        documents: number of the document of each token within its sequence, from 0 on,
            ``int32[n, length]``; for attention that does not cross documents.
        indices: numbers of the sequences in the epoch, ``int64[n]``.
        failures: always empty: a document that cannot be read raises an error.
    """

    tokens: NDArray[Any]
    documents: NDArray[np.int32]
    indices: NDArray[np.int64]
    failures: tuple[SampleFailure, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class _Format:
    """The tokens of documents and sequences.

    Attributes:
        dtype: type of a token.
        length: tokens of a sequence.
        separator: token behind each document; None for none.
    """

    dtype: np.dtype[Any]
    length: int
    separator: int | None

    @property
    def extra(self) -> int:
        """Number of tokens that are added to each document."""
        return 0 if self.separator is None else 1


@dataclass(frozen=True, eq=False)
class _Documents:
    """The samples that are documents.

    Attributes:
        dataset: dataset or view.
        field: name of the field with the tokens; None for samples that are tokens.
    """

    dataset: Readable
    field: str | None

    def lengths(self, indices: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the lengths of documents in bytes, ``int64[n]``."""
        if self.field is None:
            return self.dataset.lengths(indices)
        return self.dataset.field_lengths(self.field, indices)

    def open_reader(self) -> EpochReader:
        """Return the reader of this process."""
        return open_reader(self.dataset, None if self.field is None else [self.field])

    def each(self, batch: Any) -> Iterator[memoryview]:
        """Return the bytes of each document of a batch of samples."""
        return iter(batch if self.field is None else batch.field_bytes(self.field))


class _TokenLine:
    """All tokens of an epoch, in its order.

    Args:
        documents: the documents.
        form: tokens of documents and sequences.
        options: options of the epoch's order.

    Raises:
        UsageError: a document has no whole number of tokens; the message names it.
    """

    def __init__(self, documents: _Documents, form: _Format, options: EpochOptions) -> None:
        self._documents = documents
        self._order = documents.dataset.order_epoch(options)
        self.form = form
        self._block = lru_cache(maxsize=4)(self._read_block)
        self._starts = [0]
        for number in range(-(-len(self._order) // BLOCK_DOCUMENTS)):
            self._starts.append(self._starts[-1] + int(self._read_block(number)[1][-1]))

    @property
    def sequences(self) -> int:
        """Number of whole sequences; the tokens behind them are left out."""
        return self._starts[-1] // self.form.length

    def _read_block(self, number: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the documents of a block, and the token count before each and behind all."""
        first = number * BLOCK_DOCUMENTS
        count = min(BLOCK_DOCUMENTS, len(self._order) - first)
        indices = self._order.indices(first, count)
        sizes = self._documents.lengths(indices)
        wrong = np.flatnonzero(sizes % self.form.dtype.itemsize)
        if len(wrong):
            index = int(indices[wrong[0]])
            path = self._documents.dataset.path(index)
            raise UsageError(
                f"pack tokens: expected documents of whole tokens of {self.form.dtype}, got "
                f"{int(sizes[wrong[0]])} bytes in sample {index} {quote(path)}"
            )
        counts = np.zeros(count + 1, np.int64)
        np.cumsum(sizes // self.form.dtype.itemsize + self.form.extra, out=counts[1:])
        return indices, counts

    def documents(self, sequence: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the documents of a sequence.

        Yields:
            position of the document in the order, its index, and the first and end token that the
            sequence has of it.
        """
        at = sequence * self.form.length
        end = at + self.form.length
        while at < end:
            number = bisect_right(self._starts, at) - 1
            indices, counts = self._block(number)
            inner = at - self._starts[number]
            document = int(np.searchsorted(counts, inner, side="right")) - 1
            before = int(counts[document])
            stop = min(int(counts[document + 1]), end - self._starts[number])
            position = number * BLOCK_DOCUMENTS + document
            yield position, int(indices[document]), inner - before, stop - before
            at = self._starts[number] + stop


_Piece = tuple[int, int, int]
"""A part of a document in a sequence: position in the order, first and end token."""

_Sequence = tuple[int, list[_Piece]]
"""The number of a sequence, and its parts."""


class _TokenStream:
    """Reads the documents of some sequences of an epoch ahead.

    The document at the end of a sequence is remembered for the next one, so that a long document is
    read once.
    """

    def __init__(
        self, reader: _TokenReader, line: _TokenLine, numbers: NDArray[np.int64], plan: str
    ) -> None:
        self._reader = reader
        self._line = line
        self._sequences: deque[_Sequence] = deque()
        self._last: tuple[int, NDArray[Any]] | None = None
        self._lists = ListStream(reader.samples, self._plan(numbers), plan)

    @property
    def plan(self) -> str:
        """Plan by which documents are read ahead."""
        return self._lists.plan

    def _plan(self, numbers: NDArray[np.int64]) -> Iterator[NDArray[np.uint64]]:
        """Yield the documents that each sequence needs besides the last one of the one before."""
        last = -1
        for number in numbers.tolist():
            pieces: list[_Piece] = []
            needed = []
            for position, index, first, end in self._line.documents(number):
                pieces.append((position, first, end))
                if position != last:
                    needed.append(index)
                last = position
            self._sequences.append((number, pieces))
            yield np.array(needed, np.uint64)

    def next(self, count: int) -> TokenBatch:
        """Return the next sequences."""
        form = self._line.form
        tokens = np.empty((count, form.length), form.dtype)
        documents = np.empty((count, form.length), np.int32)
        numbers = np.empty(count, np.int64)
        for row in range(count):
            native = self._lists.next_list()
            numbers[row], pieces = self._sequences.popleft()
            read = iter(()) if native is None else self._reader.documents(native)
            at = 0
            for number, (position, first, end) in enumerate(pieces):
                if self._last is None or self._last[0] != position:
                    self._last = position, np.frombuffer(bytes(next(read)), form.dtype)
                found = self._last[1][first:end]
                tokens[row, at : at + len(found)] = found
                if len(found) < end - first:
                    tokens[row, at + len(found)] = form.separator
                documents[row, at : at + end - first] = number
                at += end - first
        return TokenBatch(tokens, documents, numbers)

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        self._lists.close()


class _TokenReader:
    """Reads sequences; the positions of an epoch are the numbers of its sequences."""

    def __init__(self, sequences: TokenSequences) -> None:
        self.samples = sequences.documents.open_reader()
        self._sequences = sequences

    @property
    def closing(self) -> bool:
        return self.samples.closing

    def documents(self, native: Any) -> Iterator[memoryview]:
        """Return the bytes of each document that a stream of the samples has read."""
        return self._sequences.documents.each(self.samples.build_batch(native, "raise"))

    def stream(
        self, options: EpochOptions, _selection: Selection | None, part: StreamOptions
    ) -> _TokenStream:
        return _TokenStream(self, self._sequences.line(options), part.positions(), part.plan)

    def build_batch(self, batch: TokenBatch, _on_error: OnError) -> TokenBatch:
        return batch


class TokenSequences:
    """Documents of tokens, packed into sequences of one length.

    In the order of an epoch, the documents follow one another and may cross the ends of sequences.
    The tokens behind the last whole sequence are left out, so that epochs of another order may have
    more or fewer sequences. ``dlfs.adapters.torch.Loader`` takes it as it takes a dataset.

    Args:
        dataset: dataset, or a view of several; each sample is an array of tokens.
        length: tokens of a sequence.
        dtype: type of a token; by default that of the field's arrays, else ``uint16``.
        field: name of the field of the samples that has the tokens, of ``bytes`` or arrays, which
            alone is read; by default a whole sample is the tokens.
        separator: token to add behind each document, such as the end-of-text token.

    Attributes:
        name: name of the dataset, with ``, packed`` behind it.

    Raises:
        UsageError: an argument is out of range, or there is no such field.

    Threads: any at once. It can be pickled and used in forked children.
    """

    def __init__(
        self,
        dataset: Readable,
        length: int,
        *,
        dtype: DTypeLike | None = None,
        field: str | None = None,
        separator: int | None = None,
    ) -> None:
        kind = _token_dtype(dataset, field, dtype)
        count = check_integer(length, 1, None, option="length", action="pack tokens")
        if separator is not None:
            low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
            check_integer(separator, low, high, option="separator", action="pack tokens")
        self.name = f"{dataset.name}, packed"
        self.documents = _Documents(dataset, field)
        self._form = _Format(kind, count, separator)
        self.line = LastOrder(partial(_TokenLine, self.documents, self._form))
        """Returns the tokens of an epoch by its options."""

    def __repr__(self) -> str:
        form = self._form
        return f"<TokenSequences of {form.length} tokens of {form.dtype}: {self.name!r}>"

    @property
    def fields(self) -> dict[str, str]:
        """Type of each value of a sequence by name, as ``Dataset.fields`` gives it."""
        length = self._form.length
        return {
            "tokens": f"{self._form.dtype.str}[{length}]",
            "documents": f"{np.dtype(np.int32).str}[{length}]",
        }

    def batches(self, batch_size: int, **options: Unpack[EpochKeywords]) -> Epoch:
        """Return one rank's batches of an epoch; see ``token_batches``."""
        kept = make_options(TokenSequences.batches, EpochKeywords, options, batch_size=batch_size)
        return self.start_epoch(kept.with_copies())

    def start_epoch(self, options: EpochOptions) -> Epoch:
        """Return the batches of an epoch, as ``batches``; for callers that keep the options.

        Raises:
            UsageError: the options do not fit the dataset, or tokens.
        """
        if options.on_error != "raise":
            raise UsageError(
                f"pack tokens: expected no on_error, got {show_value(options.on_error)}: a document"
                " that cannot be read raises an error, because others would move into its place"
            )
        if options.fields is not None:
            raise UsageError("pack tokens: expected no fields; field= is the one with the tokens")
        described = f"tokens of field {self.documents.field!r} {self._form}"
        return Epoch(
            self.open_reader,
            options,
            dataset=self.name,
            digests=digest_order(self.documents.dataset, options, described),
            sample_count=lambda other: self.line(other).sequences,
        )

    def read(self, numbers: ArrayLike, options: EpochOptions) -> TokenBatch:
        """Read sequences of an epoch by their numbers.

        Args:
            numbers: numbers of the sequences, 0..N-1, ``int64[n]``.
            options: options of the epoch's order.
        """
        wanted = np.asarray(numbers, np.int64)

        def take(reader: _TokenReader) -> TokenBatch:
            with closing(_TokenStream(reader, self.line(options), wanted, options.plan)) as stream:
                return stream.next(len(wanted))

        return follow(self.open_reader, take)

    def open_reader(self) -> _TokenReader:
        """Return the reader of this process."""
        return _TokenReader(self)


def token_batches(
    dataset: Readable,
    length: int,
    *,
    batch_size: int = 1,
    dtype: DTypeLike | None = None,
    field: str | None = None,
    separator: int | None = None,
    **options: Unpack[EpochKeywords],
) -> Epoch:
    """Pack documents of tokens into sequences of one length; return one rank's batches of them.

    Args:
        dataset: dataset, or a view of several; each sample is an array of tokens.
        length: tokens of a sequence.
        batch_size: sequences of this rank in a batch.
        dtype: type of a token; see ``TokenSequences``.
        field: name of the field of the samples that has the tokens; see ``TokenSequences``.
        separator: token to add behind each document.
        options: order and share, as ``Dataset.batches`` takes them; without ``on_error``
            and ``fields``.

    Returns:
        The epoch, of ``TokenBatch`` objects. Its positions, in ``state``, are numbers of sequences;
        a state resumes at any world size, in the middle of a document as well.

    Raises:
        UsageError: an argument is out of range, there is no such field, or a document has no
            whole number of tokens.
        DlfsError: the directory cannot be read.
    """
    sequences = TokenSequences(dataset, length, dtype=dtype, field=field, separator=separator)
    return sequences.batches(batch_size, **options)


def _token_dtype(dataset: Readable, field: str | None, dtype: DTypeLike | None) -> np.dtype[Any]:
    """Return the type of a token.

    Raises:
        UsageError: it is no integer, there is no such field, or its arrays have another type.
    """
    stored = None
    if field is not None:
        pick_fields(dataset.fields, (field,), dataset.name)
        text = dataset.fields[field]
        stored = None if text == "bytes" else FieldType.parse(text)
    if stored is not None and stored.kind == "text":
        raise UsageError(f"pack tokens: expected bytes or arrays in field {field!r}, got text")
    default = np.dtype(np.uint16) if stored is None else stored.dtype
    kind = default if dtype is None else np.dtype(dtype)
    if kind.kind not in "iu":
        raise UsageError(f"pack tokens: expected an integer dtype, got {kind}")
    if stored is not None and kind != stored.dtype:
        raise UsageError(
            f"pack tokens: expected the dtype of field {field!r}, {stored}, got {kind}"
        )
    return kind
