"""The interface of a source of samples, and what all sources share.

A ``Source`` reports its size, as far as it can know it beforehand, and then yields blocks: whole
samples in one buffer. ``stream_ahead`` makes the next block in a thread while the consumer packs
the present one. So reading and writing overlap in bounded memory: blocks of ``BUFFER_BYTES``. A
sample larger than that gets a block of its own.
"""

from __future__ import annotations

import hashlib
import os
import stat
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from errno import EIO, ESTALE
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dlfs.base.arguments import Layout
from dlfs.base.threads import ThreadPool
from dlfs.base.units import MIB
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    LimitError,
    NotFoundError,
    UsageError,
)
from dlfs.fields.arrays import DTYPE_COLUMN, SHAPE_COLUMN, ArrayForm
from dlfs.format.constants import COMPONENT_BYTES_MAX, PATH_BYTES_MAX, RESERVED_PREFIX
from dlfs.format.journal import Cursor
from dlfs.format.paths import path_problem
from dlfs.ingest.bad_records import BadRecords
from dlfs.ingest.registry import STDIN

LinkPolicy = Literal["follow", "skip", "error"]

PATH_COLUMNS = ("path", "file_name", "filename")
"""Names under which a table's column of sample paths is found, unless the caller names it."""

_UNUSED = " that is not used: "

STDIN_SHOWN = "standard input"
"""Name of standard input in messages."""
BUFFER_BYTES = 32 * MIB
BLOCK_SAMPLES_MAX = 16384
THREADS = 32
"""Number of threads that read files: most of them wait for the disk, which has a queue for each."""


Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]
Uint64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """A block of samples: sample ``i`` is ``data[offsets[i]:offsets[i] + lengths[i]]``.

    Owns: ``data`` belongs to the source, which overwrites it when the caller takes the next block.

    Attributes:
        attributes: an array for each column, with a value for each sample: bool, integers, floats,
            or strings (dtype ``object`` or ``U``); see ``DatasetWriter.add_batch``.
        cursor: position in the source after these samples and all before them, in the source's own
            terms, from which ``Source.seek`` can go on: a dictionary of JSON, at most
            ``CURSOR_BYTES_MAX`` long (a longer one is passed over). None if there is none here.
        begins_chunk: for samples that are packed as they come: True if they begin a chunk of the
            dataset, False if they follow the block before; see ``DatasetWriter.add_batch``. None:
            they are packed by the layout, as are parts of a block.
        ends_step: True for a block behind which a step of the import ends, if it has steps: when
            the source is asked for the next block, all before it are committed.
        ends_part: number of the part of the source that ends behind the block, if another part
            follows it; see ``Source.part_bytes``. None: no part ends there.
    """

    paths: list[bytes]
    data: Bytes
    offsets: Int64Array
    lengths: Int64Array
    attributes: Mapping[str, Array] = field(default_factory=dict)
    cursor: Mapping[str, Any] | None = None
    ends_step: bool = False
    begins_chunk: bool | None = None
    ends_part: int | None = None

    @classmethod
    def empty(
        cls,
        cursor: Mapping[str, Any] | None = None,
        *,
        ends_step: bool = False,
        ends_part: int | None = None,
    ) -> SampleBlock:
        """Return a block without samples."""
        nothing = np.zeros(0, np.int64)
        return cls(
            [],
            nothing.view(np.uint8),
            nothing,
            nothing,
            cursor=cursor,
            ends_step=ends_step,
            ends_part=ends_part,
        )

    def behind(self, count: int) -> SampleBlock:
        """Return the samples behind the first ``count``, and of the data what they need."""
        columns = {name: values[count:] for name, values in self.attributes.items()}
        offsets, lengths = self.offsets[count:], self.lengths[count:]
        start = int(offsets.min(initial=len(self.data)))
        return replace(
            self,
            paths=self.paths[count:],
            data=self.data[start:],
            offsets=offsets - start,
            lengths=lengths,
            attributes=columns,
            begins_chunk=None,
        )


def without_first(
    blocks: Iterable[SampleBlock], count: int, passed: Callable[[], None] = lambda: None
) -> Generator[SampleBlock, None, None]:
    """Yield the blocks without their first ``count`` samples, and without the cursors in these.

    Args:
        blocks: the blocks.
        count: number of samples to leave out.
        passed: called when the last of them was left out, before the next block is taken.
    """
    for block in blocks:
        left = min(count, len(block.paths))
        count -= left
        if left and not count:
            passed()
        if not left:
            yield replace(block, cursor=None) if count else block
        elif left < len(block.paths):
            yield block.behind(left)


def without_known(block: SampleBlock, is_known: Callable[[bytes], bool]) -> SampleBlock:
    """Return the samples of a block whose paths are not known."""
    return choose_samples(block, [not is_known(path) for path in block.paths])


def choose_samples(block: SampleBlock, wanted: Sequence[bool]) -> SampleBlock:
    """Return some samples of a block, given True for each of them; its data is not copied.

    The cursor stays: the others are behind the caller, too.
    """
    if all(wanted):
        return block
    chosen = np.array(wanted, np.bool_)
    return replace(
        block,
        paths=[path for path, keeps in zip(block.paths, wanted, strict=True) if keeps],
        offsets=block.offsets[chosen],
        lengths=block.lengths[chosen],
        attributes={name: values[chosen] for name, values in block.attributes.items()},
        begins_chunk=None,
    )


def slice_samples(block: SampleBlock, first: int, count: int) -> SampleBlock:
    """Return consecutive samples of a block; its data is not copied."""
    if count == len(block.paths):
        return block
    part = slice(first, first + count)
    found = SampleBlock(
        block.paths[part],
        block.data,
        block.offsets[part],
        block.lengths[part],
        {name: values[part] for name, values in block.attributes.items()},
    )
    if first + count < len(block.paths):
        return found
    return replace(found, cursor=block.cursor, ends_step=block.ends_step, ends_part=block.ends_part)


class Source(Protocol):
    """A source of a dataset's samples. One thread uses it, once, and closes it.

    A class of a format inherits the defaults that fit it.
    """

    name: str
    """Path of the source, or of its first and last file, for messages."""
    sample_count: int | None = None
    """Number of samples; None if it is unknown before all of them were read."""
    sample_bytes: int | None = None
    """Total size of the samples in bytes; None if it is unknown before all were read."""
    gives_shuffled: bool = False
    """True if layout ``shuffled`` gives the samples in a true shuffle of all of them.

    Then the samples of a block must depend on its position in the order alone: an import that goes
    on behind the end of a block gets the blocks that follow it in one that was not interrupted. If
    it is False, the dataset writer shuffles the samples.
    """
    gives_runs: bool = False
    """True if layout ``shuffled`` gives short runs of neighbouring samples in a true shuffle of all
    runs. Then a window in which the dataset writer shuffles has samples from everywhere, and the
    import needs no second pass."""
    skipped: Mapping[str, int] = {}
    """Number of entries left out, by reason; complete once all blocks were taken."""
    left_out: int = 0
    """Number of known samples that ``blocks`` read and did not yield; complete once all blocks were
    taken."""
    empty_directories: Sequence[bytes] = ()
    """Paths of directories without a sample under them; complete once all blocks were taken."""
    buffer_bytes: int = BUFFER_BYTES
    """Most bytes of a block of more than one sample, as far as the source can divide them."""
    part_bytes: int | None = None
    """Bytes of a part, in a source that can be divided: its blocks then say where parts end, as
    ``divide`` gives them. None: they do not."""
    undivided: str = "its samples can only be read as a whole"
    """Reason why ``divide`` returns None, for errors; a clause."""
    separate_files: Sequence[str] = ()
    """Paths of the files that can be read apart from each other, without those that cannot be read
    at all; empty if ``undivided`` says why they are not."""
    shared: bytes = b""
    """What reading some of the files needs to know of all of them; empty if that is nothing."""
    file_facts: Sequence[bytes] = ()
    """What reading a file needs to know of it, for each of ``separate_files``; empty if nothing."""
    learns: bool = False
    """True if the first sample decides on what others must have, and no ``shared`` says it."""
    fingerprint: str | None = None
    """Differs for other files, and for files that changed. None: it cannot be read again."""
    bad: BadRecords = BadRecords()
    """Records that cannot be imported; complete once all blocks were taken."""

    def leave_out(self, is_known: Callable[[bytes], bool]) -> int:
        """Do not read samples that the dataset has already, if the source can avoid it.

        The importer calls this before ``blocks``; it also leaves out what ``blocks`` still yields.

        Args:
            is_known: returns True for the path of a sample that the dataset has.

        Returns:
            The number of samples that ``blocks`` will not yield.
        """
        del is_known
        return 0

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Do not read the first samples that ``blocks`` would yield, if the source can avoid it.

        The importer calls this before ``blocks``, when it goes on with an earlier import; it leaves
        out the others of these samples itself. What ``blocks`` still yields, and what the source
        counts, such as ``skipped``, must be as if it had yielded these samples too.

        Args:
            count: number of samples that the earlier import has used.
            cursor: the last cursor of a block that was used as a whole, and the number of samples
                up to it, at most ``count``; None if the source gave none. A source that counts
                what it leaves out has these counts in its cursors.

        Returns:
            The number of samples that ``blocks`` will not yield, at most ``count``.
        """
        del count, cursor
        return 0

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Divide the source into parts, which other processes can read; called before ``blocks``.

        The parts, read one after the other, give the samples in the order in which ``blocks``
        yields them with the same ``part_bytes``.

        Args:
            layout: as for ``blocks``.
            seed: as for ``blocks``.
            part_bytes: bytes of a part, > 0; a part ends behind the sample or the file that reaches
                it.

        Returns:
            The parts; None if the source cannot be divided: ``undivided`` says why.
        """
        del layout, seed, part_bytes
        return None

    @abstractmethod
    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Yield every sample once: in an order drawn from the seed, or in path order.

        Raises:
            DlfsError: the source cannot be read, or changed while it was read.
        """
        ...

    def finish(self) -> None:
        """Delete local copies of remote files, which an interrupted import would go on with.

        The importer calls this once, when the dataset is sealed.
        """
        return

    def close(self) -> None:
        """Close the files of the source; closing it again does nothing."""
        return


@dataclass(frozen=True, slots=True)
class Division:
    """The parts of a source, a function of the source, its options, layout, seed and part size.

    Attributes:
        part_bytes: size of each part in bytes: of its samples, or of its files.
        describe: function that returns the description of a part by its number, from 0: all that
            ``ingest.parts.open_part`` needs, on any host that reaches the files or objects.
    """

    part_bytes: Sequence[int]
    describe: Callable[[int], bytes]

    def __len__(self) -> int:
        return len(self.part_bytes)


class PassingSource(Source):
    """A source that passes over the samples that an earlier import has used.

    Attributes:
        to_pass: number of these samples, the next in the order, that are not passed over yet.
    """

    to_pass = 0

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Pass over the first samples; see ``Source.seek``."""
        del cursor
        self.to_pass = count
        return count

    def passes(self, count: int = 1) -> bool:
        """Return True if the next samples are all to be passed over, and count them as passed.

        Args:
            count: number of these samples.
        """
        if not 0 < count <= self.to_pass:
            return False
        self.to_pass -= count
        return True

    def passed(self, blocks: Iterator[SampleBlock]) -> Generator[SampleBlock, None, None]:
        """Yield blocks without those of their samples that are to be passed over.

        Args:
            blocks: the next blocks. What makes them may call ``passes`` before each.
        """
        while self.to_pass and (block := next(blocks, None)) is not None:
            count = min(self.to_pass, len(block.paths))
            self.to_pass -= count
            if count < len(block.paths):
                yield block.behind(count)
        yield from blocks


class WrappedSource(Source):
    """A source that reads another one, and is closed with it.

    Args:
        source: the other source.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.name = source.name
        self.fingerprint = source.fingerprint
        self.bad = source.bad
        self._take_facts()

    def _take_facts(self) -> None:
        """Take the attributes of the other source, which it changes as it is read."""
        source = self._source
        self.sample_count, self.sample_bytes = source.sample_count, source.sample_bytes
        self.gives_shuffled, self.gives_runs = source.gives_shuffled, source.gives_runs
        self.skipped: Counter[str] = Counter(source.skipped)
        self.empty_directories = source.empty_directories

    def leave_out(self, is_known: Callable[[bytes], bool]) -> int:
        """Leave out samples of the other source; see ``Source.leave_out``."""
        count = self._source.leave_out(is_known)
        self._take_facts()
        return count

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Leave out the first samples of the other source; see ``Source.seek``."""
        return self._source.seek(count, cursor)

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Divide the other source; see ``Source.divide``."""
        self._source.buffer_bytes = min(self._source.buffer_bytes, self.buffer_bytes)
        found = self._source.divide(layout=layout, seed=seed, part_bytes=part_bytes)
        self.undivided = self._source.undivided
        return found

    def blocks_of_source(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Return the blocks of the other source."""
        self._source.buffer_bytes = min(self._source.buffer_bytes, self.buffer_bytes)
        self._source.part_bytes = self.part_bytes
        return self._source.blocks(layout=layout, seed=seed)

    def finish(self) -> None:
        """Delete the local copies of the other source; see ``Source.finish``."""
        self._source.finish()

    def close(self) -> None:
        """Close the other source."""
        self._source.close()


def file_state(file: int | str) -> tuple[int, int]:
    """Return the size of a file in bytes and its time of change in ns: both change with a write.

    Args:
        file: descriptor or path of the file.
    """
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def check_unchanged(where: str, file: int | str, state: tuple[int, int]) -> None:
    """Raise DeviceError if a file has changed since ``file_state`` returned a state."""
    if file_state(file) != state:
        raise DeviceError(f"{where}: the file changed during the import", ESTALE)


def fingerprint_of(*parts: object, paths: Iterable[str] = ()) -> str:
    """Return a text that differs for other parts, and for other or changed files.

    Args:
        parts: strings, numbers, and tuples and dictionaries of them.
        paths: files, and folders with all that is in them.

    Raises:
        DeviceError: a file cannot be looked at.
    """
    found = hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=16)
    for path in paths:
        with file_errors(f"import {path}"):
            found.update(repr((os.path.abspath(path), *file_state(path))).encode())
            for folder, folders, files in os.walk(path):
                folders.sort()
                for name in sorted(files):
                    file = os.path.join(folder, name)
                    state = file_state(file) if os.path.exists(file) else ()
                    found.update(os.fsencode(repr((file, *state))))
    return found.hexdigest()


def source_name(paths: Sequence[str]) -> str:
    """Return the name of a source of files: its only path, or the first and the last."""
    first, last = (STDIN_SHOWN if path == STDIN else path for path in (paths[0], paths[-1]))
    return first if len(paths) == 1 else f"{first} .. {last}"


def single_path(paths: Sequence[str], noun: str) -> str:
    """Return the only path of a format that takes one.

    Raises:
        UsageError: there are several.
    """
    if len(paths) != 1:
        raise UsageError(f"import {paths[1]}: expected one {noun}, got {len(paths)}")
    return paths[0]


@contextmanager
def device_errors(where: str) -> Iterator[None]:
    """Turn the errors of the system into DeviceError; ``where`` is the action and the file."""
    try:
        yield
    except DlfsError:
        raise
    except OSError as error:
        raise DeviceError(f"{where}: {error.strerror or error}", error.errno or EIO) from error


@contextmanager
def file_errors(where: str, noun: str = "file") -> Iterator[None]:
    """Turn the errors of opening or reading a file into typed errors.

    Args:
        where: the action and the file, for the message.
        noun: what the file is called in the message if it is missing.

    Raises:
        NotFoundError: the file does not exist.
        DeviceError: it cannot be read.
    """
    with device_errors(where):
        try:
            yield
        except FileNotFoundError as error:
            raise NotFoundError(f"{where}: there is no such {noun}") from error


_IRREGULAR = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: str) -> None:
    """Check that a path, and all in it if it is a folder, is a regular file; wait for nothing.

    Raises:
        UsageError: a FIFO, a socket or a device is there, which a reader might wait for.
        NotFoundError: the path does not exist.
        DeviceError: it cannot be looked at.
    """
    pending = [path]
    seen: set[tuple[int, int]] = set()  # links may lead to a folder again
    while pending:
        name = pending.pop()
        # Of what is in a folder, a reader that wants it says why it cannot be looked at.
        with file_errors(f"import {name}", "file or folder") if name == path else suppress(OSError):
            status = os.stat(name)
            kind = stat.S_IFMT(status.st_mode)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            if kind in _IRREGULAR:
                raise UsageError(
                    f"import {name}: expected a file or a folder, got {_IRREGULAR[kind]}; the "
                    "source '-' reads standard input"
                )
            if kind == stat.S_IFDIR:
                with os.scandir(name) as entries:
                    pending += [entry.path for entry in entries if not entry.is_file()]


def stream_ahead(
    blocks: Generator[SampleBlock, None, None],
    *,
    bad: BadRecords,
    cancel: Callable[[], None] = lambda: None,
) -> Generator[SampleBlock, None, None]:
    """Yield blocks, while a thread makes the next one.

    Args:
        blocks: makes the blocks, and is closed at the end; two that follow each other share no
            memory.
        bad: bad records of the source, which count when their block is taken.
        cancel: called before the thread is waited for, when not all blocks were taken: ends the
            wait of ``blocks`` for data.

    Threads: one thread runs ``blocks``; it has ended when the iterator is closed.
    """

    def read() -> tuple[SampleBlock | None, Any]:
        with bad.hold_back() as held:
            return next(blocks, None), held

    with closing(blocks), ThreadPool(1, thread_name_prefix="dlfs-ingest") as executor:
        try:
            block: SampleBlock | None
            pending = executor.submit(read)
            while True:
                block, held = pending.result()
                bad.release(held)
                if block is None:
                    break
                pending = executor.submit(read)
                yield block
        except BaseException:
            cancel()
            raise


def array_attributes(dtype: npt.DTypeLike, shape: tuple[int, ...], count: int) -> dict[str, Array]:
    """Return the attributes of samples that are arrays of one type and shape.

    A sample's bytes are the array's elements in row-major order. Its type and shape go into the
    columns ``dlfs:dtype`` and ``dlfs:shape``, so that readers return arrays again.

    Args:
        dtype: type of the elements: bool, numbers, times, or strings of a fixed length.
        shape: shape of each array.
        count: number of samples.

    Returns:
        Columns for ``SampleBlock.attributes`` or ``DatasetWriter.add_batch``.

    Raises:
        UsageError: no sample can have this type or shape.
    """
    texts = zip((DTYPE_COLUMN, SHAPE_COLUMN), ArrayForm.of(dtype, shape).texts, strict=True)
    return {name: np.full(count, text, object) for name, text in texts}


def check_attribute_names(names: Iterable[str], where: str) -> None:
    """Check that no name that a source or a caller gives is one of ours.

    Args:
        names: names of columns, features or members that would become attributes.
        where: the action and the source, for the error.

    Raises:
        UsageError: a name begins with the prefix of the columns that describe samples.
    """
    for name in names:
        if name.startswith(RESERVED_PREFIX):
            raise UsageError(
                f"{where}: attribute {name!r}: expected a name that does not begin with "
                f"{RESERVED_PREFIX!r}, which is reserved; choose others by attributes, or rename it"
            )


def left_out_names(noun: str, names: Sequence[str]) -> dict[str, int]:
    """Return the reason why columns or the like are left out: by choice; it has their names."""
    return {f"{noun}{_UNUSED}{', '.join(names)}": len(names)} if names else {}


def add_skipped(total: Counter[str], more: Mapping[str, int]) -> None:
    """Add the entries that a file of several left out; columns of all files count once."""
    for reason, count in more.items():
        is_column = reason.startswith(f"column{_UNUSED}")
        total[reason] = max(total[reason], count) if is_column else total[reason] + count


def keep_link(policy: LinkPolicy, where: str, skipped: Counter[str]) -> bool:
    """Return True if a symbolic link is to be followed; count it if it is skipped.

    Raises:
        UsageError: the policy refuses links.
    """
    if policy == "error":
        raise UsageError(
            f"{where}: expected no symbolic links, got one; links='skip' leaves it out"
        )
    if policy == "skip":
        skipped["symbolic link"] += 1
    return policy == "follow"


def clean_path(name: bytes, where: str) -> bytes:
    """Return the name of an archive member as a sample's path; empty for the root itself.

    Args:
        name: name in the archive; ``./a//b`` and ``a/b`` give the same path.
        where: name of the archive, for the error.

    Raises:
        FormatError: the name is absolute, or has a component ``..``.
        LimitError: the path or one of its components is too long.
    """
    if name.startswith(b"/"):
        raise FormatError(f"{where}: expected a relative name, got {show(name)}")
    path = b"/".join(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in path.split(b"/"):
        raise FormatError(f"{where}: expected a name without '..', got {show(name)}")
    if path:
        check_path(path, where)
    return path


def check_path(path: bytes, where: str) -> None:
    """Check that a path is valid for a sample.

    Raises:
        LimitError: the path, or a component of it, is too long.
        FormatError: the path breaks another rule.
    """
    problem = path_problem(path)
    if problem is None:
        return
    too_long = (
        len(path) > PATH_BYTES_MAX or len(max(path.split(b"/"), key=len)) > COMPONENT_BYTES_MAX
    )
    kind = LimitError if too_long else FormatError
    raise kind(f"{where}: {show(path)}: {problem}")


def show(path: bytes) -> str:
    """Return a path on one readable line, with unprintable bytes escaped."""
    text = path.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else ascii(text)[1:-1]
