"""The race: lays data out for the peers, lets them run in turn, keeps every run.

The machine drifts, so that what is compared runs within the same minute: peers form groups, as many
as their data has room on the disk; in each round of a group DLFS and the limits run as well, every
second round in the opposite order. A floor's ratio is of two runs of one round of one group.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.contestant import Contestant, Ground, Limits, drop_caches_for
from bench.contestants.bare import BareCopy, BareUring
from bench.contestants.fio import FioRead
from bench.contestants.samples import DEPTH
from bench.datasets import DatasetSpec, Scene, scene_of_volume
from bench.machine import Machine, Unavailable
from bench.peers.child import Job
from bench.peers.children import Child, MemoryWatch
from bench.peers.data import Data, list_corpus
from bench.peers.depths import sweep
from bench.peers.outcome import GLOBAL_GIVEN, GLOBAL_OWN, Converted, Outcome, Run
from bench.peers.peer import GLOBAL, Borrowing, Limited, Peer, Shared
from bench.peers.processes import cpu_seconds_of_all
from bench.peers.registry import all_peers
from bench.progress import Allowance, Tell
from dlfs.units import GIB, KIB, MIB

REFERENCES = ("dlfs", "dlfs-epoch", "dlfs-epoch-all")
"""What runs in every group: the ways of DLFS that peers are compared with."""

SIZES = {"512": 128 * MIB, "4k": 512 * MIB, "110k": 512 * MIB}
QUICK_SIZES = {"512": 16 * MIB, "4k": 64 * MIB, "110k": 128 * MIB}
DEPTHS_OVER = "4k"
"""The data set of the sweep over the reads in flight."""

TWO_AT = "4k"
"""The data set where two processes run at once, unless ``--processes`` asks for more."""

SECONDS, ROUNDS = 0.5, 3
STATES = ("cold", "warm")
CONVERSIONS = 0.2
"""Of the time of a group, about: what is said of the time left depends on it."""
ROOM_PER_BYTE = 1.5
"""What a peer's data may take on the disk for each byte of samples, when groups are formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What the command line decides.

    Attributes:
        directory: on the disk under test; a folder is made in it.
        sizes: keys of data sets.
        total_bytes: of each data set, instead of its own.
        corpus: folder of real files, for the data set of that name.
        seconds: of a timed part.
        rounds: runs of each peer; of some ways only the first, as `Entry.once` says.
        minutes: for all; who is late makes fewer rounds, one at least. None: as long as it takes.
        processes: how many at once: 1, or 1 and 2.
        two_at: the data set where it is not only one; "": all of them.
        states: ``cold``, ``warm``, or both.
        room_bytes: on the disk, for the peers of a group.
        seed: of everything.
        depths: sweep over the reads in flight, too.
        quick: take the data sets' quick sizes.
    """

    directory: Path
    sizes: tuple[str, ...] = tuple(SIZES)
    total_bytes: int | None = None
    corpus: Path | None = None
    seconds: float = SECONDS
    rounds: int = ROUNDS
    minutes: float | None = None
    processes: tuple[int, ...] = (1, 2)
    two_at: str = ""
    states: tuple[str, ...] = STATES
    room_bytes: int = 15 * GIB
    seed: int = 1
    depths: bool = False
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A peer in one manner, as it runs in each round.

    Attributes:
        peer: who.
        order: as in `Run`.
        warm: with everything in memory.
        processes: at once.
    """

    peer: Peer
    order: str
    warm: bool
    processes: int

    @property
    def once(self) -> bool:
        """Whether the first round is enough: two at once, and a second, lesser order of a peer."""
        is_global = self.order in (GLOBAL_GIVEN, GLOBAL_OWN)
        return self.processes > 1 or (self.peer.random and not is_global)


class Race:
    """A race over one data set after the other.

    Args:
        course: what to do.
        tell: told what is under way, and which share of the whole is done.
        machine: whose caches are dropped.
    """

    def __init__(self, course: Course, tell: Tell, machine: Machine | None = None) -> None:
        self.course, self.tell = course, tell
        self.folder = course.directory / "dlfs-bench-peers"
        self.machine = machine or Machine(self.folder)
        self.outcome = Outcome()
        self.allowance = Allowance(course.minutes)
        self.groups = 0

    def run(self, peers: Sequence[Peer]) -> Outcome:
        """All data sets.

        Raises:
            WrongBytesError: a peer gave other bytes than the source has.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        try:
            for key in self.course.sizes:
                _DatasetRace(self, key).run(peers)
                shutil.rmtree(self.folder / key)
        finally:
            shutil.rmtree(self.folder)
        return self.outcome


def data_of(peer: Peer) -> str:
    """The peer whose data one reads: mostly itself."""
    return peer.data_of if isinstance(peer, Borrowing) else peer.name


def share(peer: Peer, folder: Path, *, warm: bool) -> AbstractContextManager[tuple[int, ...]]:
    """What a peer's readers share, while they run."""
    if isinstance(peer, Shared):
        return peer.share(folder, warm=warm)
    return nullcontext(())


class _DatasetRace:
    """All peers over one data set."""

    def __init__(self, race: Race, key: str) -> None:
        self.race, self.key, self.course = race, key, race.course
        self.folder = race.folder / key
        self.folder.mkdir()
        self.data = self._data()
        self._converted: dict[str, Converted] = {}
        self._scene: Scene | None = None
        self._stretch, self._done = (0.0, 1.0), 0.0

    def _data(self) -> Data:
        course = self.course
        if self.key == "corpus":
            assert course.corpus is not None
            listing = self.folder / "paths"
            total_bytes = list_corpus(course.corpus, listing)
            return Data(self.key, total_bytes, course.seed, str(course.corpus), str(listing))
        own_bytes = (QUICK_SIZES if course.quick else SIZES)[self.key]
        return Data(self.key, course.total_bytes or own_bytes, course.seed)

    def run(self, peers: Sequence[Peer]) -> None:
        """Every group of them."""
        source = self.data.source()
        self.race.outcome.datasets[self.key] = {
            **asdict(self.data.spec),
            "samples": len(source),
            "sample_bytes": int(source.lengths.sum()),
        }
        references = [peer for peer in peers if peer.name in REFERENCES]
        entries = [entry for peer in references for entry in self._entries_of(peer)]
        kept = {data_of(peer) for peer in references}
        groups = list(self._groups([peer for peer in peers if peer not in references]))
        for number, group in enumerate(groups):
            self._stretch = (number / len(groups), (number + 1) / len(groups))
            others = []
            for at, peer in enumerate(group):
                self._reach(CONVERSIONS * at / len(group))
                others += self._entries_of(peer)
            self._run_group([*entries, *others])
            entries = [entry for entry in entries if entry.processes == 1]
            for name in {data_of(peer) for peer in group} - kept:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        self._run_depths()

    def _reach(self, share: float) -> None:
        """So much of the group is done."""
        begin, end = self._stretch
        self._done = begin + share * (end - begin)

    def _tell(self, what: str) -> None:
        sizes = self.course.sizes
        self.race.tell(f"{self.key}: {what}", (sizes.index(self.key) + self._done) / len(sizes))

    def _has_time_for(self, seconds: float) -> bool:
        """Whether one more round leaves the groups and data sets to come their time."""
        sizes = self.course.sizes
        due = (sizes.index(self.key) + self._stretch[1]) / len(sizes)
        return self.race.allowance.has_time_for(seconds, due)

    def _groups(self, peers: Sequence[Peer]) -> Iterator[list[Peer]]:
        """As many peers as there is room for; who borrows data goes with who has it."""
        families: dict[str, list[Peer]] = {}
        for peer in peers:
            families.setdefault(data_of(peer), []).append(peer)
        room = max(1, int(self.course.room_bytes / (ROOM_PER_BYTE * self.data.total_bytes)))
        owners = list(families)
        for at in range(0, max(1, len(owners)), room):
            yield [peer for owner in owners[at : at + room] for peer in families[owner]]

    # ---- data ----

    def _data_for(self, peer: Peer) -> Data:
        owner = all_peers()[data_of(peer)]
        if isinstance(owner, Limited):
            return replace(self.data, samples_max=owner.samples_max)
        return self.data

    def _log_of(self, peer: Peer) -> Path:
        return self.folder / f"{peer.name}.log"

    def _job(self, verb: str, peer: Peer, **more: Any) -> Job:
        folder = str(self.folder / data_of(peer))
        return Job(verb, peer.name, folder, asdict(self._data_for(peer)), **more)

    def _convert(self, owner: Peer) -> None:
        if owner.name in self._converted and (self.folder / owner.name).exists():
            return
        self._tell(f"{owner.name} converts")
        (self.folder / owner.name).mkdir()
        with Child(self._job("prepare", owner), self._log_of(owner)) as child:
            converted = Converted(owner.name, self.key, **child.answer())
        self._converted[owner.name] = converted
        self.race.outcome.converted.append(converted)

    def _entries_of(self, peer: Peer) -> list[Entry]:
        """How a peer can run, after its data was laid out; nothing where that cannot be."""
        try:
            self._convert(all_peers()[data_of(peer)])
            with (
                share(peer, self.folder / data_of(peer), warm=False),
                Child(self._job("look", peer), self._log_of(peer)) as child,
            ):
                looked = child.answer()
        except Unavailable as reason:
            self._miss(peer.name, "", str(reason))
            return []
        self.race.outcome.versions |= looked["versions"]
        own_order = looked["own_order"]
        orders = [GLOBAL_GIVEN] if peer.random else []
        orders += [GLOBAL_OWN if own_order == GLOBAL else own_order] if own_order else []
        return [
            Entry(peer, order, state == "warm", processes)
            for order in orders
            for state in self.course.states
            for processes in self.course.processes
            if processes == 1 or (order == orders[0] and self.course.two_at in ("", self.key))
        ]

    def _miss(self, name: str, how: str, reason: str) -> None:
        missing = (name, self.key, how, reason)
        if missing not in self.race.outcome.missing:
            self.race.outcome.missing.append(missing)

    # ---- running ----

    def _run_group(self, entries: Sequence[Entry]) -> None:
        self.race.groups += 1
        failed: set[Entry] = set()
        took = 0.0
        for number in range(self.course.rounds):
            if number and not self._has_time_for(took):
                break
            begun = time.monotonic()
            ordered = entries if number % 2 == 0 else list(reversed(entries))
            for at, entry in enumerate(ordered):
                if entry in failed or (number and entry.once):
                    continue
                state = "warm" if entry.warm else "cold"
                how = f"{entry.order}, {state}, {entry.processes} at once"
                rounds_done = (number + at / len(ordered)) / self.course.rounds
                self._reach(CONVERSIONS + (1 - CONVERSIONS) * rounds_done)
                self._tell(f"round {number + 1}: {entry.peer.name}, {how}")
                try:
                    self.race.outcome.runs.append(self._race(entry, number))
                except Unavailable as reason:
                    failed.add(entry)
                    self._miss(entry.peer.name, how, str(reason))
            self._run_limits(number)
            took = time.monotonic() - begun

    def _race(self, entry: Entry, number: int) -> Run:
        """One run of a peer."""
        peer, folder = entry.peer, self.folder / data_of(entry.peer)
        with ExitStack() as stack:
            servers = stack.enter_context(share(peer, folder, warm=entry.warm))
            children = [
                stack.enter_context(Child(self._race_job(entry, number, at), self._log_of(peer)))
                for at in range(entry.processes)
            ]
            for child in children:
                child.answer()
            drop_caches_for(self.race.machine, cold=not entry.warm)
            cpu = cpu_seconds_of_all(servers)
            with MemoryWatch([*servers, *(child.pid for child in children)]) as watch:
                for child in children:
                    child.tell("go")
                answers = [child.answer() for child in children]
                watch.look()
            cpu = cpu_seconds_of_all(servers) - cpu
            for child in children:
                child.tell("check")
            checked = sum(child.answer()["checked"] for child in children)
        return replace(
            self._run_of(entry, number, answers, cpu),
            start_pss_bytes=watch.start_bytes,
            peak_pss_bytes=watch.peak_bytes,
            checked=checked,
        )

    def _race_job(self, entry: Entry, number: int, at: int) -> Job:
        return self._job(
            "race",
            entry.peer,
            samples=self._converted[data_of(entry.peer)].samples,
            batch=self.data.spec.batch,
            own=entry.order != GLOBAL_GIVEN,
            warm=entry.warm,
            share=at,
            shares=entry.processes,
            seconds=self.course.seconds,
            round=number,
        )

    def _run_of(
        self, entry: Entry, number: int, answers: list[dict[str, Any]], server_cpu: float
    ) -> Run:
        """What the children's answers come to.

        A steady pace is counted from the first batch on: until there, some have read ahead. Who
        came to the end has nothing left that was read ahead, and is counted from its opening.
        """
        begins = [answer["opened" if answer["whole"] else "first"] for answer in answers]
        before = [(0, 0) if a["whole"] else (a["first_samples"], a["first_bytes"]) for a in answers]
        ends = [answer["end"] for answer in answers]
        everything = sum(answer["samples"] for answer in answers)
        samples = everything - sum(first for first, _ in before)
        cpu = sum(end["cpu_seconds"] for end in ends) - sum(b["cpu_seconds"] for b in begins)
        waits = [a["first"]["seconds"] - a["start"]["seconds"] for a in answers]
        return Run(
            peer=entry.peer.name,
            dataset=self.key,
            order=entry.order,
            warm=entry.warm,
            processes=entry.processes,
            group=self.race.groups,
            round=number,
            samples=samples,
            bytes=sum(answer["bytes"] for answer in answers) - sum(size for _, size in before),
            seconds=max(end["seconds"] for end in ends) - min(b["seconds"] for b in begins),
            cpu_seconds=cpu + server_cpu * samples / max(1, everything),
            first_batch_seconds=None if entry.warm else max(waits),
            peak_rss_bytes=max(answer["peak_rss_bytes"] for answer in answers),
        )

    # ---- limits ----

    def _ground(self, number: int) -> Ground:
        """Where the limits run: on the very bytes of DLFS's volume."""
        if self._scene is None:
            folder, source = self.folder / "dlfs", self.data.source()
            everything = np.arange(len(source))
            volume = folder / "volume.img"
            self._scene = scene_of_volume(
                self.data.spec, source, folder, volume, everything, self.course.seed
            )
        limits = Limits(seconds=self.course.seconds, seed=self.course.seed)
        return Ground(self._scene, self.race.machine, limits, number)

    def _run_limits(self, number: int) -> None:
        if "dlfs" not in self._converted:
            return
        ground = self._ground(number)
        for limit in limits_of(self.data.spec):
            self._tell(f"round {number + 1}: {limit.name}")
            try:
                sample = limit.contestant.run(ground)
            except Unavailable as reason:
                self._miss(limit.name, "", str(reason))
                continue
            self.race.outcome.runs.append(
                Run(
                    peer=limit.name,
                    dataset=self.key,
                    order=GLOBAL_GIVEN,
                    warm=limit.warm,
                    processes=1,
                    group=self.race.groups,
                    round=number,
                    samples=sample.samples,
                    bytes=sample.samples * limit.sample_bytes or sample.bytes,
                    seconds=sample.seconds,
                    cpu_seconds=sample.cpu_seconds,
                    checked=sample.checked,
                    limit=True,
                )
            )

    def _run_depths(self) -> None:
        if self.course.depths and self.key == DEPTHS_OVER and "dlfs" in self._converted:
            for number in range(self.course.rounds):
                self._tell(f"round {number + 1}: reads in flight")
                self.race.outcome.depths += sweep(self._ground(number), self.key)


@dataclass(frozen=True, slots=True)
class Limit:
    """What the machine can do.

    Attributes:
        name: in tables.
        contestant: who finds out.
        warm: out of memory; else the device.
        sample_bytes: of a sample, where a read is longer; 0: what was read counts.
    """

    name: str
    contestant: Contestant
    warm: bool = False
    sample_bytes: int = 0


def limits_of(spec: DatasetSpec) -> list[Limit]:
    """What the machine can do with such samples."""
    block_bytes = max(4 * KIB, spec.mean_bytes // (4 * KIB) * (4 * KIB))
    return [
        Limit("fio, a read a sample", FioRead(block_bytes, DEPTH), sample_bytes=spec.mean_bytes),
        Limit("fio, 256 KiB reads", FioRead(256 * KIB, 32)),
        Limit("io_uring in C", BareUring()),
        Limit("memcpy in C", BareCopy(), warm=True),
    ]
