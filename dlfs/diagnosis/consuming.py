"""Reads epochs of a dataset as training would, and tells where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlfs.service.statistics import Activity, MemberActivity, activity, member_activity

if TYPE_CHECKING:
    import dlfs
    from dlfs import Dataset

MOMENTS_MAX = 100
"""Most points of the rate over time."""


@dataclass(frozen=True)
class Moment:
    """The bytes and epoch that a run had reached at a time.

    Attributes:
        seconds: time since the start.
        sample_bytes: bytes of samples taken until then.
        epoch: number of the epoch.
    """

    seconds: float
    sample_bytes: int
    epoch: int


@dataclass(frozen=True)
class Run:
    """Measurements of one run.

    Attributes:
        seconds: time that it took.
        waited_seconds: time for which the consumer waited for batches.
        batches: number of batches taken.
        seen: work of the dataset's reader.
        members: work of each member.
        history: the run at some moments.
        reads: number of reads of all members.
        read_bytes: bytes of these reads.
    """

    seconds: float
    waited_seconds: float
    batches: int
    seen: Activity
    members: list[MemberActivity]
    history: tuple[Moment, ...] = ()
    reads: int = 0
    read_bytes: int = 0

    @property
    def waited_share(self) -> float:
        """Share of the time for which the consumer waited, 0..1."""
        return self.waited_seconds / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Counters:
    """The counters of a dataset's reader at the start of a run.

    Attributes:
        total: ``Dataset.stats``.
        members: ``Dataset.member_stats``.
    """

    total: Mapping[str, int]
    members: Sequence[Mapping[str, Any]]

    def run_until(
        self,
        dataset: Dataset,
        seconds: float,
        waited_seconds: float,
        batches: int,
        history: tuple[Moment, ...] = (),
    ) -> Run:
        """Return the run that ends now; the arguments are attributes of ``Run``."""
        after = dataset.member_stats()
        pairs = list(zip(self.members, after, strict=True))
        return Run(
            seconds,
            waited_seconds,
            batches,
            activity(self.total, dataset.stats(), seconds),
            [member_activity(old, new, seconds) for old, new in pairs],
            history,
            sum(new["reads"] - old.get("reads", 0) for old, new in pairs),
            sum(new["read_bytes"] - old.get("read_bytes", 0) for old, new in pairs),
        )


def consume(
    dataset: Dataset,
    batch_size: int,
    seconds: float,
    *,
    shuffle: dlfs.Shuffle | None,
    step_s: float = 0.0,
    epochs_max: int | None = None,
    notify: Callable[[int], None] = lambda _: None,
) -> Run:
    """Take batches, epoch after epoch, until the time is over.

    Args:
        dataset: the dataset.
        batch_size: samples in a batch.
        seconds: time to read.
        shuffle: order of the epochs.
        step_s: time that training takes for a batch, in seconds.
        epochs_max: most epochs to read; None: as many as there is time for.
        notify: called with the bytes of samples taken so far.
    """
    counters = Counters(dataset.stats(), dataset.member_stats())
    waited, batches, epoch, done_bytes = 0.0, 0, 0, 0
    start = now = time.monotonic()
    history = [Moment(0.0, 0, 0)]
    while now < start + seconds and len(dataset) and epoch != epochs_max:
        with dataset.batches(batch_size, epoch=epoch, shuffle=shuffle, world_size=1) as stream:
            while now < start + seconds:
                batch = next(stream, None)
                waited += time.monotonic() - now
                if batch is None:
                    break
                done_bytes += int(batch.lengths.sum())
                batch.release()
                time.sleep(step_s)
                batches += 1
                notify(done_bytes)
                now = time.monotonic()
                if now - start >= history[-1].seconds + seconds / MOMENTS_MAX:
                    history.append(Moment(now - start, done_bytes, epoch))
        epoch += 1
        now = time.monotonic()
    return counters.run_until(dataset, now - start, waited, batches, tuple(history))


def add_runs(runs: Sequence[Run]) -> Run:
    """Return several runs as one, without the work of each member."""
    each = [run.seen for run in runs]
    phases = {
        name: sum(seen.phase_seconds[name] for seen in each) for name in each[0].phase_seconds
    }
    seen = Activity(
        seconds=sum(seen.seconds for seen in each),
        samples=sum(seen.samples for seen in each),
        sample_bytes=sum(seen.sample_bytes for seen in each),
        cache_hits=sum(seen.cache_hits for seen in each),
        requests=sum(seen.requests for seen in each),
        errors=sum(seen.errors for seen in each),
        retries=sum(seen.retries for seen in each),
        phase_seconds=phases,
        wait_seconds=sum(seen.wait_seconds for seen in each),
    )
    return Run(
        sum(run.seconds for run in runs),
        sum(run.waited_seconds for run in runs),
        sum(run.batches for run in runs),
        seen,
        [],
        reads=sum(run.reads for run in runs),
        read_bytes=sum(run.read_bytes for run in runs),
    )
