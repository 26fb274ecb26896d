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
from contextlib import closing
from copy import copy
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
from bench.peers.peer import Peer, Reader, all_peers
from bench.process import Parent, run_child
from bench.resources import peak_rss_bytes, timed, tree_cpu_seconds

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
        data: the samples.
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
    data: Data
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
    """A tally that also records the indices of an own order, by batch."""

    seen: list[Any] = field(default_factory=list)

    def add_found(self, indices: Any, found: Any, *, own: bool) -> None:
        """Count a batch."""
        if own:
            self.seen.append(copy(indices))
        if len(found) != len(indices):
            raise WrongBytesError(f"{len(indices)} samples were requested, {len(found)} returned")
        is_list = isinstance(found, list)
        size_bytes = sum(map(len, found)) if is_list else int(found.lengths.sum())
        self.add(indices, size_bytes, lambda position: bytes(found[position]))


# ---- preparing -----------------------------------------------------------------------------------


def prepare(job: Job, peer: Peer, parent: Parent) -> None:
    """Convert the samples, and answer with what that took."""
    folder, source = Path(job.folder), job.data.source()
    with timed(tree_cpu_seconds) as watch:
        peer.prepare(source, folder)
        subprocess.run(["sync", "-f", folder], check=True)  # until the data is on the disk
    parent.answer(
        **asdict(watch),
        stored_bytes=sum(512 * path.lstat().st_blocks for path in (folder, *folder.rglob("*"))),
        samples=len(source),
        sample_bytes=source.total_bytes(),
    )


def look(job: Job, peer: Peer, parent: Parent) -> None:
    """Open what was prepared, check some samples, and answer with the reader's orders."""
    reader = peer.open(Path(job.folder))
    try:
        parent.answer(
            own_order=reader.own_order,
            checked=check(peer, reader, job.data.source(), seed=0),
            versions={name: metadata.version(name) for name in peer.packages},
        )
    finally:
        reader.close()


# ---- checking ------------------------------------------------------------------------------------


def check(peer: Peer, reader: Reader, source: Source, seed: int) -> int:
    """Read some samples, compare them with the source, and return their number."""
    wanted = min(CHECKED_AFTER, len(source))
    found: dict[int, bytes] = {}
    if peer.random:
        random = np.random.default_rng([seed, 17])
        ends = [0, len(source) - 1, int(source.lengths.argmin()), int(source.lengths.argmax())]
        others = random.choice(len(source), wanted, replace=False).tolist()
        indices = list(dict.fromkeys([*ends, *others]))
        got = reader.read(_as_taken(reader, indices))
        return check_bytes(source, {index: bytes(got[at]) for at, index in enumerate(indices)})
    with closing(reader.epoch(seed, min(64, wanted))) as epoch:
        for chosen, got in epoch:
            for at, index in enumerate(map(int, chosen)):
                if index in found:
                    raise WrongBytesError(f"sample {index} came twice in an epoch")
                found[index] = bytes(got[at])
            if len(found) >= wanted:
                break
    return check_bytes(source, found)


def check_order(job: Job, seen: list[Any], whole: bool) -> None:
    """Check that an epoch returned no sample twice, and each one if it ran to its end."""
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

    Of the samples, only those of the batches that a first pass covered are used, in a new order. 0:
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
            yield reader.epoch(job.seed + 100 * number, job.batch)
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


@dataclass(frozen=True, slots=True)
class Pace:
    """The timed part of a run of one child; times are in seconds of the monotonic clock.

    A steady pace counts from the first batch on, because some peers read ahead until then. A child
    that came to the end of its order has nothing left that was read ahead, so that its pace counts
    from the opening of the first pass.

    Attributes:
        begin: time at which the steady pace begins.
        first: time of the first batch.
        end: time of the last batch.
        cpu_seconds: CPU time from `begin` to `end`.
        samples: samples read from `begin` to `end`.
        bytes: bytes of these samples.
        all_samples: samples read in the whole timed part.
        whole: True if it went to the end of the order.
    """

    begin: float
    first: float
    end: float
    cpu_seconds: float
    samples: int
    bytes: int
    all_samples: int
    whole: bool


def read_timed(job: Job, reader: Reader, covered: int, tally: OrderTally) -> Pace:
    """Read batches until the time is over; a cold reader also stops at the end of the order."""
    passes = _passes(job, reader, covered)
    batches = next(passes)
    begin = Moment.now()
    first: Moment | None = None
    until, whole = float("inf"), True
    samples_before = bytes_before = 0
    while True:
        for indices, found in batches:
            tally.add_found(indices, found, own=job.own)
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
    if not whole:
        begin, samples_before, bytes_before = first, first_samples, first_bytes
    return Pace(
        begin=begin.seconds,
        first=first.seconds,
        end=end.seconds,
        cpu_seconds=end.cpu_seconds - begin.cpu_seconds,
        samples=tally.samples - samples_before,
        bytes=tally.bytes - bytes_before,
        all_samples=tally.samples,
        whole=whole,
    )


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
    start = time.monotonic()
    if not job.warm:
        reader = peer.open(folder)
    try:
        tally = OrderTally()
        pace = read_timed(job, reader, covered, tally)
        parent.answer(
            **asdict(pace),
            first_batch_seconds=pace.first - start,
            peak_rss_bytes=peak_rss_bytes(os.getpid()),
        )
        parent.wait_for("check")
        source = job.data.source()
        check_order(job, tally.seen, pace.whole)
        checked = check_bytes(source, tally.remembered) + check(peer, reader, source, job.seed)
    finally:
        reader.close()
    parent.answer(checked=checked)


def work(job: Job, parent: Parent) -> None:
    """Do the work of a job, and name the peer and the data set in errors."""
    verbs = {"prepare": prepare, "look": look, "race": race}
    try:
        verbs[job.verb](job, all_peers()[job.peer], parent)
    except WrongBytesError as error:
        raise WrongBytesError(f"{job.peer}, {job.data.key}: {error.args[0]}") from error


if __name__ == "__main__":
    sys.exit(run_child(Job, work))
