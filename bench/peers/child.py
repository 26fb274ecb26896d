"""The child process of a peer: converts the samples, or reads them once.

`bench.process` has the protocol. The job is a `Job`. A reading child answers ``ready`` when it has
warmed up, waits for ``go``, reads, answers with what it measured, waits for ``check``, and answers
with the number of samples that it compared. Times are of the monotonic clock, which all processes
share.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from bench.datasets import Source
from bench.errors import WrongBytesError
from bench.measurement import Tally, check_bytes
from bench.peers.data import Data
from bench.peers.peer import Peer, Reader
from bench.peers.registry import all_peers
from bench.process import Parent, run_child
from bench.resources import peak_rss_bytes, tree_cpu_seconds

CHECKED_AFTER = 256
"""Samples that are read and compared after the timed part."""

FILE_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """The job of a child process.

    Attributes:
        verb: ``prepare``, ``look`` or ``race``.
        peer: name of the peer.
        folder: folder of the peer's data.
        data: fields of `Data`.
        samples: number of samples.
        batch: samples of one batch.
        own: read in the peer's own order; else in a given global one.
        warm: read from memory; else cold.
        share: number of this child, 0..shares-1; it reads a share of the order.
        shares: number of children that read at once.
        seconds: duration of the timed part. A cold one ends sooner with the order.
        round: number of the round; each has another order.
    """

    verb: str
    peer: str
    folder: str
    data: dict[str, Any]
    samples: int = 0
    batch: int = 0
    own: bool = False
    warm: bool = False
    share: int = 0
    shares: int = 1
    seconds: float = 0.0
    round: int = 0

    @property
    def seed(self) -> int:
        """Seed of this child's order; never 0, the seed of the order in which DLFS packs."""
        return 1000 * (self.round + 1) + self.share

    def source(self) -> Source:
        """Return the samples."""
        return Data(**self.data).source()


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of the clock and the CPU time until then, in seconds."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def now(cls) -> Moment:
        """Return the present moment."""
        return cls(time.monotonic(), tree_cpu_seconds())


@dataclass
class OrderTally(Tally):
    """A tally that also records the samples of an own order.

    Attributes:
        seen: indices of each batch.
    """

    seen: list[Any] = field(default_factory=list)

    def add_found(self, indices: Any, found: Any) -> None:
        """Count a batch; ``indices`` is None for an own order, whose batches carry indices."""
        own = indices is None
        if isinstance(found, list):
            if own:
                indices = [index for index, _ in found]
                found = [data for _, data in found]
            size_bytes = sum(map(len, found))
        else:
            indices = found.indices.copy() if own else indices
            size_bytes = int(found.lengths.sum())
        if own:
            self.seen.append(indices)
        if len(found) != len(indices):
            raise WrongBytesError(f"{len(indices)} samples were requested, {len(found)} returned")
        self.add(indices, size_bytes, lambda position: bytes(found[position]))


# ---- preparing -----------------------------------------------------------------------------------


def prepare(job: Job, peer: Peer, parent: Parent) -> None:
    """Convert the samples, and answer with what that took."""
    folder, source = Path(job.folder), job.source()
    before = Moment.now()
    peer.prepare(source, folder)
    subprocess.run(["sync", "-f", folder], check=True)  # until the data is on the disk
    after = Moment.now()
    parent.answer(
        seconds=after.seconds - before.seconds,
        cpu_seconds=after.cpu_seconds - before.cpu_seconds,
        stored_bytes=_stored_bytes(folder),
        samples=len(source),
        sample_bytes=source.total_bytes(),
    )


def look(job: Job, peer: Peer, parent: Parent) -> None:
    """Open what was prepared, check some samples, and answer with the reader's orders."""
    reader = peer.open(Path(job.folder))
    try:
        parent.answer(
            own_order=reader.own_order,
            checked=check(peer, reader, job.source(), seed=0),
            versions={name: metadata.version(name) for name in peer.packages},
        )
    finally:
        reader.close()


def _stored_bytes(folder: Path) -> int:
    """Return the bytes that a folder takes on the disk."""
    total = 0
    for top, _, names in os.walk(folder):
        total += sum(512 * os.lstat(os.path.join(top, name)).st_blocks for name in names)
        total += 512 * os.lstat(top).st_blocks
    return total


# ---- checking ------------------------------------------------------------------------------------


def check(peer: Peer, reader: Reader, source: Source, seed: int) -> int:
    """Read some samples, compare them with the source, and return their number.

    Raises:
        WrongBytesError: a sample differs, or was returned twice.
    """
    wanted = min(CHECKED_AFTER, len(source))
    found: dict[int, bytes] = {}
    if peer.random:
        random = np.random.default_rng([seed, 17])
        ends = [0, len(source) - 1, int(source.lengths.argmin()), int(source.lengths.argmax())]
        others = random.choice(len(source), wanted, replace=False).tolist()
        indices = list(dict.fromkeys([*ends, *others]))
        got = reader.read(_as_taken(reader, indices))
        found = {index: bytes(got[at]) for at, index in enumerate(indices)}
    else:
        for index, data in _pairs(reader, seed, min(64, wanted)):
            if index in found:
                raise WrongBytesError(f"sample {index} came twice in an epoch")
            found[index] = data
            if len(found) >= wanted:
                break
    return check_bytes(source, found)


def _pairs(reader: Reader, seed: int, batch: int) -> Iterator[tuple[int, bytes]]:
    """Yield index and bytes of each sample of an epoch."""
    epoch: Any = reader.epoch(seed, batch)
    try:
        for found in epoch:
            if isinstance(found, list):
                for index, data in found:
                    yield int(index), bytes(data)
            else:
                for position in range(len(found)):
                    yield int(found.indices[position]), bytes(found[position])
    finally:
        if hasattr(epoch, "close"):
            epoch.close()


def check_order(job: Job, seen: list[Any], whole: bool) -> None:
    """Check that an epoch returned no sample twice, and each one if it ran to its end.

    Raises:
        WrongBytesError: it did not.
    """
    if job.warm or not seen:
        return
    indices = np.concatenate([np.asarray(part, np.int64) for part in seen])
    if len(np.unique(indices)) != len(indices):
        raise WrongBytesError("an epoch gave a sample twice")
    if whole and len(indices) != job.samples:
        raise WrongBytesError(f"an epoch of {job.samples} samples ended after {len(indices)}")


# ---- reading -------------------------------------------------------------------------------------


def _as_taken(reader: Reader, indices: Any) -> Any:
    """Return indices in the form that the reader takes."""
    if reader.takes_arrays:
        return np.asarray(indices, np.int64)
    return indices if isinstance(indices, list) else indices.tolist()


def _order(job: Job, reader: Reader, covered: int) -> list[Any]:
    """Return this child's share of a random order, in batches, before anything is timed.

    Args:
        job: the job.
        reader: reader that takes the indices.
        covered: batches that a first pass read. Only their samples are used, in a new order. 0:
            all samples.
    """
    everything = np.random.default_rng([job.round, 7]).permutation(job.samples)
    mine = everything[job.share :: job.shares]
    if covered:
        mine = np.random.default_rng([job.round, 9]).permutation(mine[: covered * job.batch])
    starts = range(0, len(mine), job.batch)
    return [_as_taken(reader, mine[at : at + job.batch]) for at in starts]


def _passes(job: Job, reader: Reader, covered: int) -> Iterator[Iterator[tuple[Any, Any]]]:
    """Yield passes over the samples; a pass yields ``(indices, batch)``."""
    order = [] if job.own else _order(job, reader, covered)
    for number in count():
        if job.own:
            yield ((None, found) for found in reader.epoch(job.seed + 100 * number, job.batch))
        else:
            yield ((indices, reader.read(indices)) for indices in order)


def _read_into_page_cache(folder: Path) -> None:
    """Read all files of a folder, except for file systems that are mounted below it."""
    buffer, device = bytearray(FILE_READ_BYTES), folder.stat().st_dev
    for top, below, names in os.walk(folder):
        below[:] = [name for name in below if os.lstat(f"{top}/{name}").st_dev == device]
        for name in names:
            with open(os.path.join(top, name), "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def _warmed(job: Job, peer: Peer) -> tuple[Reader, int]:
    """Open a reader with its data in memory; return it and the batches of its first pass."""
    folder = Path(job.folder)
    reader = peer.open_warm(folder)
    if reader is None:
        _read_into_page_cache(folder)
        reader = peer.open(folder)
    covered, until = 0, time.monotonic() + job.seconds
    for _ in next(_passes(job, reader, 0)):
        covered += 1
        if time.monotonic() > until:
            break
    return reader, covered


@dataclass(slots=True)
class Timed:
    """The timed part of a run.

    Attributes:
        opened: moment when the first pass had been opened.
        first: moment of the first batch.
        end: moment of the last batch.
        first_samples: samples of the first batch.
        first_bytes: bytes of the first batch.
        whole: True if it went to the end of the order.
    """

    opened: Moment
    first: Moment
    end: Moment
    first_samples: int
    first_bytes: int
    whole: bool


def read_timed(job: Job, reader: Reader, covered: int, tally: OrderTally) -> Timed:
    """Read batches until the time is over; a cold reader also stops at the end of the order."""
    passes = _passes(job, reader, covered)
    batches = next(passes)
    opened = Moment.now()
    first: Moment | None = None
    until, whole = float("inf"), True
    first_samples = first_bytes = 0
    while True:
        for indices, found in batches:
            tally.add_found(indices, found)
            if first is None:
                first = Moment.now()
                until = first.seconds + job.seconds
                first_samples, first_bytes = tally.samples, tally.bytes
            elif time.monotonic() > until:
                whole = False
                break
        if not whole or not job.warm:
            break
        batches = next(passes)
    end = Moment.now()
    assert first is not None
    return Timed(opened, first, end, first_samples, first_bytes, whole)


def race(job: Job, peer: Peer, parent: Parent) -> None:
    """Read once, and check what was read."""
    folder = Path(job.folder)
    covered = 0
    if job.warm:
        reader, covered = _warmed(job, peer)
    else:
        peer.open(folder).close()
    parent.answer(ready=True)
    parent.wait_for("go")
    start = Moment.now()
    if not job.warm:
        reader = peer.open(folder)
    try:
        tally = OrderTally()
        timed = read_timed(job, reader, covered, tally)
        parent.answer(
            samples=tally.samples,
            bytes=tally.bytes,
            start=asdict(start),
            **asdict(timed),
            peak_rss_bytes=peak_rss_bytes(os.getpid()),
        )
        parent.wait_for("check")
        source = job.source()
        check_order(job, tally.seen, timed.whole)
        checked = check_bytes(source, tally.remembered) + check(peer, reader, source, job.seed)
    finally:
        reader.close()
    parent.answer(checked=checked)


def work(values: dict[str, Any], parent: Parent) -> None:
    """Do the work of a job, and name the peer and the data set in errors."""
    job = Job(**values)
    try:
        {"prepare": prepare, "look": look, "race": race}[job.verb](
            job, all_peers()[job.peer], parent
        )
    except WrongBytesError as error:
        raise WrongBytesError(f"{job.peer}, {job.data['key']}: {error.args[0]}") from error


if __name__ == "__main__":
    sys.exit(run_child(work))
