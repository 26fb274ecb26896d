"""What runs in a child process: one peer prepares its data, or reads it once.

The parent writes a job as one line of JSON, then ``go`` and ``check`` when it is time; answers are
lines of JSON. The peer's own output goes to the standard error, so that it cannot be mistaken for
an answer. Times are of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bench.contestant import CHECKED, WrongBytesError
from bench.machine import Unavailable
from bench.peers.data import Data, RaceSource
from bench.peers.peer import Peer, Reader, ShuffledReader, TakesArrays, Warmable
from bench.peers.processes import own_cpu_seconds, peak_rss_bytes
from bench.peers.registry import all_peers

CHECKED_AFTER = 256
"""Samples that are read and compared when the timed part is over."""

KEEP_EVERY = 16
"""Batches of which one leaves a sample to be compared."""

FILE_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """What a child is to do.

    Attributes:
        verb: ``prepare``, ``look`` or ``race``.
        peer: by name.
        folder: where its data is.
        data: which samples.
        samples: how many there are.
        batch: samples of one.
        own: in the peer's own order; else in a global one that it is given.
        warm: with everything in memory; else cold.
        share: which part of the order, 0..shares-1.
        shares: processes at work.
        seconds: of the timed part, which ends sooner with the order when that is cold.
        round: each has another order.
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
        """Of this child's order; never 0, by which DLFS packs: that order is the one on disk."""
        return 1000 * (self.round + 1) + self.share


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: on the clock, and CPU time until then."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def now(cls) -> Mark:
        """This one."""
        return cls(time.monotonic(), own_cpu_seconds())


@dataclass(slots=True)
class Count:
    """Batches that came, and a few of their samples."""

    own: bool
    samples: int = 0
    bytes: int = 0
    batches: int = 0
    kept: dict[int, bytes] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)

    def add(self, indices: Any, found: Any) -> None:
        """Count a batch; the indices of an own order are in what was found."""
        as_list = isinstance(found, list)
        if self.own:
            indices = [index for index, _ in found] if as_list else found.indices.copy()
            self.seen.append(indices)
        if not as_list:
            self.bytes += int(found.lengths.sum())
        elif self.own:
            self.bytes += sum([len(data) for _, data in found])
        else:
            self.bytes += sum(map(len, found))
        if len(found) != len(indices):
            raise WrongBytesError(f"{len(indices)} samples were asked for, {len(found)} came")
        if self.batches % KEEP_EVERY == 0 and len(self.kept) < CHECKED:
            position = self.batches * 37 % len(found)
            data = found[position]
            self.kept[int(indices[position])] = bytes(data[1] if self.own and as_list else data)
        self.samples += len(found)
        self.batches += 1


class Pipe:
    """The way to the parent."""

    def __init__(self, told: TextIO, answers: TextIO) -> None:
        self._told, self._answers = told, answers

    def say(self, **answer: Any) -> None:
        """An answer."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def wait_for(self, word: str) -> None:
        """The parent's next word, which must be this one."""
        line = self._told.readline()
        if line != f"{word}\n":
            raise SystemExit(f"expected {word} from the parent, got {line!r}")


# ---- preparing -----------------------------------------------------------------------------------


def prepare(job: Job, peer: Peer, pipe: Pipe) -> None:
    """Convert the samples."""
    folder = Path(job.folder)
    source = Data(**job.data).source()
    before = Mark.now()
    peer.prepare(source, folder)
    subprocess.run(["sync", "-f", folder], check=True)  # it is on the disk, not on its way there
    after = Mark.now()
    pipe.say(
        seconds=after.seconds - before.seconds,
        cpu_seconds=after.cpu_seconds - before.cpu_seconds,
        stored_bytes=_stored_bytes(folder),
        samples=len(source),
        sample_bytes=int(source.lengths.sum()),
    )


def look(job: Job, peer: Peer, pipe: Pipe) -> None:
    """Open what was prepared, and see whether it can be read."""
    reader = peer.open(Path(job.folder))
    try:
        pipe.say(
            own_order=own_order_of(reader),
            checked=check(peer, reader, Data(**job.data).source(), seed=0),
            versions={name: metadata.version(name) for name in peer.packages},
        )
    finally:
        reader.close()


def own_order_of(reader: Reader) -> str:
    """What a reader calls its own order; "" where it has none."""
    return reader.own_order if isinstance(reader, ShuffledReader) else ""


def _stored_bytes(folder: Path) -> int:
    """What a folder takes on the disk."""
    total = 0
    for top, _, names in os.walk(folder):
        total += sum(512 * os.lstat(os.path.join(top, name)).st_blocks for name in names)
        total += 512 * os.lstat(top).st_blocks
    return total


# ---- checking ------------------------------------------------------------------------------------


def check(peer: Peer, reader: Reader, source: RaceSource, seed: int) -> int:
    """Read some samples and compare them with the source; how many there were.

    Raises:
        WrongBytesError: one differs, or came twice.
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
    return compare(source, found)


def _pairs(reader: Reader, seed: int, batch: int) -> Iterator[tuple[int, bytes]]:
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


def compare(source: RaceSource, found: dict[int, bytes]) -> int:
    """Compare samples with the source; how many there were.

    Raises:
        WrongBytesError: one differs.
    """
    for index, data in found.items():
        if data != source.data(index):
            raise WrongBytesError(f"sample {index} has {len(data)} bytes that are not its own")
    return len(found)


def check_order(job: Job, seen: list[Any], whole: bool) -> None:
    """An epoch gives no sample twice, and to its end each.

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


# ---- racing --------------------------------------------------------------------------------------


def _as_taken(reader: Reader, indices: Any) -> Any:
    """Indices in the form that a reader documents."""
    if isinstance(reader, TakesArrays):
        return np.asarray(indices, np.int64)
    return indices if isinstance(indices, list) else indices.tolist()


def _order(job: Job, reader: Reader, covered: int) -> list[Any]:
    """Batches of indices, made before anything is timed: this child's share of a random order.

    What a first pass covered, in batches, is mixed anew, and nothing else is in it; 0: all.
    """
    everything = np.random.default_rng([job.round, 7]).permutation(job.samples)
    mine = everything[job.share :: job.shares]
    if covered:
        mine = np.random.default_rng([job.round, 9]).permutation(mine[: covered * job.batch])
    starts = range(0, len(mine), job.batch)
    return [_as_taken(reader, mine[at : at + job.batch]) for at in starts]


def _passes(job: Job, reader: Reader, covered: int) -> Iterator[Iterator[tuple[Any, Any]]]:
    """Passes over the samples; each gives ``(indices, what was found)``."""
    order = [] if job.own else _order(job, reader, covered)
    for number in count():
        if job.own:
            yield ((None, found) for found in reader.epoch(job.seed + 100 * number, job.batch))
        else:
            yield ((indices, reader.read(indices)) for indices in order)


def _read_into_page_cache(folder: Path) -> None:
    """Read a folder's files; what is mounted in it is left to the first pass."""
    buffer, device = bytearray(FILE_READ_BYTES), folder.stat().st_dev
    for top, below, names in os.walk(folder):
        below[:] = [name for name in below if os.lstat(f"{top}/{name}").st_dev == device]
        for name in names:
            with open(os.path.join(top, name), "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def _warmed(job: Job, peer: Peer) -> tuple[Reader, int]:
    """A reader with everything in memory that it reads, and the batches of a first pass."""
    folder = Path(job.folder)
    if isinstance(peer, Warmable):
        reader = peer.open_warm(folder)
    else:
        _read_into_page_cache(folder)
        reader = peer.open(folder)
    passed, until = 0, time.monotonic() + job.seconds
    for _ in next(_passes(job, reader, 0)):
        passed += 1
        if time.monotonic() > until:
            break
    return reader, passed


@dataclass(slots=True)
class Timed:
    """The timed part: its moments, and whether it went to the end of the order."""

    opened: Mark
    first: Mark
    end: Mark
    first_samples: int
    first_bytes: int
    whole: bool


def read_timed(job: Job, reader: Reader, covered: int, tally: Count) -> Timed:
    """Read batches until time is over; cold, until the order is."""
    passes = _passes(job, reader, covered)
    batches = next(passes)
    opened = Mark.now()
    first: Mark | None = None
    until, whole = float("inf"), True
    first_samples = first_bytes = 0
    while True:
        for indices, found in batches:
            tally.add(indices, found)
            if first is None:
                first = Mark.now()
                until = first.seconds + job.seconds
                first_samples, first_bytes = tally.samples, tally.bytes
            elif time.monotonic() > until:
                whole = False
                break
        if not whole or not job.warm:
            break
        batches = next(passes)
    end = Mark.now()
    assert first is not None
    return Timed(opened, first, end, first_samples, first_bytes, whole)


def race(job: Job, peer: Peer, pipe: Pipe) -> None:
    """Read once."""
    folder = Path(job.folder)
    covered = 0
    if job.warm:
        reader, covered = _warmed(job, peer)
    else:
        peer.open(folder).close()
    pipe.say(ready=True)
    pipe.wait_for("go")
    start = Mark.now()
    if not job.warm:
        reader = peer.open(folder)
    try:
        tally = Count(job.own)
        timed = read_timed(job, reader, covered, tally)
        pipe.say(
            samples=tally.samples,
            bytes=tally.bytes,
            start=asdict(start),
            **asdict(timed),
            peak_rss_bytes=peak_rss_bytes(os.getpid()),
            own_order=own_order_of(reader),
        )
        pipe.wait_for("check")
        source = Data(**job.data).source()
        check_order(job, tally.seen, timed.whole)
        checked = compare(source, tally.kept) + check(peer, reader, source, job.seed)
    finally:
        reader.close()
    pipe.say(checked=checked)


def main() -> int:
    """Do the job that the parent writes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    pipe = Pipe(sys.stdin, answers)
    job = Job(**json.loads(sys.stdin.readline()))
    peer = all_peers()[job.peer]
    try:
        {"prepare": prepare, "look": look, "race": race}[job.verb](job, peer, pipe)
    except Unavailable as reason:
        pipe.say(unavailable=str(reason))
    except WrongBytesError as error:
        pipe.say(wrong=f"{job.peer}, {job.data['key']}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
