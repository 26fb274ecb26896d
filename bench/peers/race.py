"""The race: converts data sets for the peers, measures the peers in rounds, and keeps every run.

Peers form groups, as many in each as their data has room on the disk. In each round of a group, the
ways of DLFS that peers are compared with and the limits of the machine run as well. A ratio is
always of two runs of one round of one group.

Every run of a peer is a child process (`bench.peers.child`); this process starts it, drops the
kernel's caches, sends the start signal and watches its memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.contenders.bare import BareCopy, BareUring
from bench.contenders.fio import FioRead
from bench.contenders.samples import DEPTH
from bench.datasets import DatasetSpec, Scene, scene_of_volume
from bench.errors import Unavailable
from bench.machine import Machine
from bench.measurement import Contender, Environment, Limits
from bench.peers.child import Job
from bench.peers.data import Data, list_corpus
from bench.peers.outcome import GLOBAL_GIVEN, GLOBAL_OWN, Converted, Outcome, Run
from bench.peers.peer import GLOBAL, Peer, all_peers
from bench.process import Child, start_child
from bench.progress import Stretch
from bench.resources import MemoryWatch, cpu_seconds_of_all
from bench.rounds import run_rounds
from dlfs.base.units import GIB, KIB, MIB

REFERENCES = ("dlfs", "dlfs-epoch", "dlfs-epoch-all")
"""Ways of DLFS that peers are compared with: they run in every group."""

SIZES = {"512": 128 * MIB, "4k": 512 * MIB, "110k": 512 * MIB}
QUICK_SIZES = {"512": 16 * MIB, "4k": 64 * MIB, "110k": 128 * MIB}

TWO_AT = "4k"
"""Data set that two processes also read at once, unless ``--processes`` is given."""

SECONDS, ROUNDS = 0.5, 3
STATES = ("cold", "warm")
CONVERSIONS = 0.2
"""Rough share of a group's time that conversions take; for the progress line."""
ROOM_PER_BYTE = 1.5
"""Disk space that a peer may need for each byte of samples, for forming groups."""

CONVERSION_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 400.0, 150.0, 10.0
"""Most time of a conversion, of another answer, and from SIGTERM to SIGKILL, so that a peer that
hangs does not take the time of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a race; the options of the command line describe them.

    `two_at` is the only data set that more than one process reads; empty: all of them.
    """

    directory: Path
    sizes: tuple[str, ...] = tuple(SIZES)
    total_bytes: int | None = None
    corpus: Path | None = None
    seconds: float = SECONDS
    rounds: int = ROUNDS
    processes: tuple[int, ...] = (1, 2)
    two_at: str = ""
    states: tuple[str, ...] = STATES
    room_bytes: int = 15 * GIB
    seed: int = 1
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A peer in one manner, as it runs in each round.

    Attributes:
        peer: the peer.
        order: order as in `Run`.
        warm: True if everything is in memory.
        processes: number of processes that read at once.
    """

    peer: Peer
    order: str
    warm: bool
    processes: int

    @property
    def manner(self) -> str:
        """Order, state and number of processes, in words."""
        return f"{self.order}, {'warm' if self.warm else 'cold'}, {self.processes} at once"

    @property
    def label(self) -> str:
        """Name and manner, for the progress line."""
        return f"{self.peer.name}, {self.manner}"

    @property
    def is_once(self) -> bool:
        """True if only the first round has it: two processes, or a second order of a peer."""
        is_global = self.order in (GLOBAL_GIVEN, GLOBAL_OWN)
        return self.processes > 1 or (self.peer.random and not is_global)


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of the machine, which runs in each round like a peer.

    Attributes:
        label: name in tables.
        contender: contender that measures it.
        warm: True if it is a limit of memory; else of the device.
        sample_bytes: bytes of a sample if a read is longer; 0: all bytes that were read count.
    """

    label: str
    contender: Contender
    warm: bool = False
    sample_bytes: int = 0


def limits_of(spec: DatasetSpec) -> list[Limit]:
    """Return the limits that matter for such samples."""
    block_bytes = max(4 * KIB, spec.mean_bytes // (4 * KIB) * (4 * KIB))
    return [
        Limit("fio, a read a sample", FioRead(block_bytes, DEPTH), sample_bytes=spec.mean_bytes),
        Limit("fio, 256 KiB reads", FioRead(256 * KIB, 32)),
        Limit("io_uring in C", BareUring()),
        Limit("memcpy in C", BareCopy(), warm=True),
    ]


class Race:
    """A race over one data set after the other.

    Args:
        settings: settings.
        outcome: receives the results.
        machine: machine whose caches are dropped; None: this one.
    """

    def __init__(
        self, settings: Settings, outcome: Outcome, machine: Machine | None = None
    ) -> None:
        self.settings = settings
        self.folder = settings.directory / "dlfs-bench-peers"
        self.machine = machine or Machine(self.folder)
        self.outcome = outcome
        self.groups = 0

    def run(self, peers: Sequence[Peer], whole: Stretch) -> None:
        """Run all data sets."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        keys = self.settings.sizes
        try:
            for number, key in enumerate(keys):
                stretch = whole.part(number / len(keys), (number + 1) / len(keys), key)
                _DatasetRace(self, key).run(peers, stretch)
                shutil.rmtree(self.folder / key)
        finally:
            shutil.rmtree(self.folder)


class _DatasetRace:
    """The race of all peers over one data set."""

    def __init__(self, race: Race, key: str) -> None:
        self.race, self.key, self.settings, self.outcome = race, key, race.settings, race.outcome
        self.folder = race.folder / key
        self.folder.mkdir()
        self.data = self._data()
        self._converted: dict[str, Converted | Unavailable] = {}
        self._scene: Scene | None = None

    def _data(self) -> Data:
        settings = self.settings
        if self.key == "corpus":
            assert settings.corpus is not None
            listing = self.folder / "paths"
            total_bytes = list_corpus(settings.corpus, listing)
            return Data(self.key, total_bytes, settings.seed, str(settings.corpus), str(listing))
        own_bytes = (QUICK_SIZES if settings.quick else SIZES)[self.key]
        return Data(self.key, settings.total_bytes or own_bytes, settings.seed)

    def run(self, peers: Sequence[Peer], stretch: Stretch) -> None:
        """Run every group of peers."""
        source = self.data.source()
        self.outcome.datasets[self.key] = {
            **asdict(self.data.spec),
            "samples": len(source),
            "sample_bytes": source.total_bytes(),
        }
        references = [peer for peer in peers if peer.name in REFERENCES]
        entries = [entry for peer in references for entry in self._entries_of(peer, stretch)]
        owners = {peer.owner for peer in references}
        groups = list(self._groups([peer for peer in peers if peer not in references]))
        for number, group in enumerate(groups):
            part = stretch.part(number / len(groups), (number + 1) / len(groups))
            others = []
            for at, peer in enumerate(group):
                conversion = part.part(CONVERSIONS * at / len(group), CONVERSIONS)
                others += self._entries_of(peer, conversion)
            self._run_group([*entries, *others], part.part(CONVERSIONS, 1.0))
            entries = [entry for entry in entries if entry.processes == 1]
            for name in {peer.owner for peer in group} - owners:
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _groups(self, peers: Sequence[Peer]) -> Iterator[list[Peer]]:
        """Yield groups of as many peers as there is room for; peers with the same data together."""
        families: dict[str, list[Peer]] = {}
        for peer in peers:
            families.setdefault(peer.owner, []).append(peer)
        room = max(1, int(self.settings.room_bytes / (ROOM_PER_BYTE * self.data.total_bytes)))
        owners = list(families)
        for at in range(0, max(1, len(owners)), room):
            yield [peer for owner in owners[at : at + room] for peer in families[owner]]

    # ---- data ----

    def _folder_of(self, peer: Peer) -> Path:
        return self.folder / peer.owner

    def _child(self, verb: str, peer: Peer, **more: Any) -> AbstractContextManager[Child]:
        """Start a child with a job for a peer."""
        data = replace(self.data, samples_max=all_peers()[peer.owner].samples_max)
        job = Job(verb, peer.name, str(self._folder_of(peer)), data, **more)
        log = self.folder / f"{peer.name}.log"
        return start_child("bench.peers.child", job, log, grace_seconds=STOP_SECONDS)

    def _convert(self, owner: Peer, stretch: Stretch) -> Converted:
        """Convert the data set for a peer, unless that was done or has failed before."""
        known = self._converted.get(owner.name)
        if isinstance(known, Unavailable):
            raise known
        if known is not None and self._folder_of(owner).exists():
            return known
        stretch.show(f"{owner.name} converts")
        self._folder_of(owner).mkdir()
        try:
            with self._child("prepare", owner) as child:
                converted = Converted(owner.name, self.key, **child.answer(CONVERSION_SECONDS))
        except Unavailable as reason:
            self._converted[owner.name] = reason
            raise
        self._converted[owner.name] = converted
        self.outcome.converted.append(converted)
        return converted

    def _entries_of(self, peer: Peer, stretch: Stretch) -> list[Entry]:
        """Convert a peer's data and return the manners it can run in; none if it cannot run."""
        try:
            self._convert(all_peers()[peer.owner], stretch)
            with (
                peer.share(self._folder_of(peer), warm=False),
                self._child("look", peer) as child,
            ):
                looked = child.answer(ANSWER_SECONDS)
        except Unavailable as reason:
            self._miss(peer.name, "", reason)
            return []
        self.outcome.versions |= looked["versions"]
        own_order = looked["own_order"]
        orders = [GLOBAL_GIVEN] if peer.random else []
        orders += [GLOBAL_OWN if own_order == GLOBAL else own_order] if own_order else []
        return [
            Entry(peer, order, state == "warm", processes)
            for order in orders
            for state in self.settings.states
            for processes in self.settings.processes
            if processes == 1 or (order == orders[0] and self.settings.two_at in ("", self.key))
        ]

    def _miss(self, name: str, manner: str, reason: Unavailable) -> None:
        missing = (name, self.key, manner, str(reason))
        if missing not in self.outcome.missing:
            self.outcome.missing.append(missing)

    # ---- runs ----

    def _run_group(self, entries: Sequence[Entry], stretch: Stretch) -> None:
        """Run the entries and the limits of the machine in rounds."""
        self.race.groups += 1
        # Limits read the bytes of DLFS's volume.
        has_volume = isinstance(self._converted.get("dlfs"), Converted)
        limits = limits_of(self.data.spec) if has_volume else []
        contenders: list[Entry | Limit] = [*entries, *limits]

        def run_once(contender: Entry | Limit, number: int) -> None:
            try:
                if isinstance(contender, Limit):
                    run = self._run_limit(contender, number)
                else:
                    run = self._run_entry(contender, number)
            except Unavailable as reason:
                if isinstance(contender, Limit):
                    self._miss(contender.label, "", reason)
                else:
                    self._miss(contender.peer.name, contender.manner, reason)
                raise
            self.outcome.runs.append(run)

        def is_once(contender: Entry | Limit) -> bool:
            return isinstance(contender, Entry) and contender.is_once

        by_label = {one.label: one for one in contenders}
        run_rounds(by_label, self.settings.rounds, run_once, stretch, is_once=is_once)

    def _run_entry(self, entry: Entry, number: int) -> Run:
        """Run a peer once."""
        peer, converted = entry.peer, self._converted[entry.peer.owner]
        assert isinstance(converted, Converted)
        with ExitStack() as stack:
            servers = stack.enter_context(peer.share(self._folder_of(peer), warm=entry.warm))
            job = {
                "samples": converted.samples,
                "batch": self.data.spec.batch,
                "own": entry.order != GLOBAL_GIVEN,
                "warm": entry.warm,
                "shares": entry.processes,
                "seconds": self.settings.seconds,
                "round": number,
            }
            children = [
                stack.enter_context(self._child("race", peer, share=at, **job))
                for at in range(entry.processes)
            ]
            for child in children:
                child.answer(ANSWER_SECONDS)
            self.race.machine.require_cold(cold=not entry.warm)
            cpu = cpu_seconds_of_all(servers)
            with MemoryWatch([*servers, *(child.pid for child in children)]) as watch:
                for child in children:
                    child.send("go")
                answers = [child.answer(ANSWER_SECONDS) for child in children]
                watch.snapshot()
            cpu = cpu_seconds_of_all(servers) - cpu
            for child in children:
                child.send("check")
            checked = sum(child.answer(ANSWER_SECONDS)["checked"] for child in children)
        samples, everything = (
            sum(answer[key] for answer in answers) for key in ("samples", "all_samples")
        )
        cpu *= samples / max(1, everything)  # the servers' part of the steady pace
        wait = max(answer["first_batch_seconds"] for answer in answers)
        return Run(
            peer=peer.name,
            dataset=self.key,
            order=entry.order,
            warm=entry.warm,
            processes=entry.processes,
            group=self.race.groups,
            round=number,
            samples=samples,
            bytes=sum(answer["bytes"] for answer in answers),
            seconds=max(a["end"] for a in answers) - min(a["begin"] for a in answers),
            cpu_seconds=cpu + sum(answer["cpu_seconds"] for answer in answers),
            first_batch_seconds=None if entry.warm else wait,
            start_pss_bytes=watch.start_bytes,
            peak_pss_bytes=watch.peak_bytes,
            peak_rss_bytes=max(answer["peak_rss_bytes"] for answer in answers),
            checked=checked,
        )

    # ---- limits of the machine ----

    def _environment(self, number: int) -> Environment:
        """Return the environment in which limits are measured: the bytes of DLFS's volume."""
        if self._scene is None:
            folder, source = self.folder / "dlfs", self.data.source()
            everything, volume = np.arange(len(source)), folder / "volume.img"
            self._scene = scene_of_volume(
                self.data.spec, source, folder, volume, everything, self.settings.seed
            )
        limits = Limits(seconds=self.settings.seconds, seed=self.settings.seed)
        return Environment(self._scene, self.race.machine, limits, number)

    def _run_limit(self, limit: Limit, number: int) -> Run:
        """Measure a limit once."""
        found = limit.contender.run(self._environment(number))
        return Run(
            peer=limit.label,
            dataset=self.key,
            order=GLOBAL_GIVEN,
            warm=limit.warm,
            processes=1,
            group=self.race.groups,
            round=number,
            samples=found.samples,
            bytes=found.samples * limit.sample_bytes or found.bytes,
            seconds=found.seconds,
            cpu_seconds=found.cpu_seconds,
            checked=found.checked,
            limit=True,
        )
