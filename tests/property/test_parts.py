"""The dataset of an import by workers depends on the source and the options alone.

Hypothesis chooses the order in which parts are taken, by which worker, when steps are committed,
which workers die, and when the coordinator is replaced.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.dataset import committed_steps
from dlfs.dataset.part_writer import PartWriter
from dlfs.dataset.parts_writer import PartsWriter
from tests.support.parts import (
    Worker,
    add_part,
    check_no_leak,
    everything,
    import_plainly,
    open_parts,
)
from tests.support.volumes import new_volume, write_dataset

COUNTS = (9, 14, 0, 3, 21)
WORKERS = 2


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)


def fresh(path: Path) -> dlfs.Volume:
    return dlfs.open(new_volume(path, size_bytes=4 * MIB, chunk_bytes=16 * KIB))


class World:
    """An import on a volume: a coordinator and its workers, each with at most one part."""

    def __init__(self, volume: dlfs.Volume) -> None:
        self.volume, self.now_s, self.born = volume, 0.0, 0
        self.parts: PartsWriter
        self.workers: list[Worker] = []
        self.writing: dict[int, PartWriter] = {}
        self.coordinate()

    def coordinate(self) -> None:
        """Replace the coordinator, with whom its workers end."""
        self.writing.clear()
        for worker in self.workers:
            worker.close()
        self.parts = open_parts(
            self.volume,
            part_count=len(COUNTS),
            workers=8,  # than there are, so that the lost ones do not have all chunks
            clock=lambda: self.now_s,
            wait=self.wait,
        )
        self.workers = [self.worker(slot) for slot in range(WORKERS)]

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def worker(self, slot: int) -> Worker:
        self.born += 1
        return Worker(self.volume, self.parts, f"worker {self.born}", slot)

    def write(self, slot: int, part: int) -> None:
        """Have a worker take a part, if it is not complete and no other worker has it."""
        taken = {each.part for each in self.writing.values()}
        if not self.parts.progress(part).is_complete and part not in taken:
            self.reserve()
            writer = self.writing[slot] = self.workers[slot].writer(part)
            add_part(writer, part, COUNTS, writer.source_count)

    def end_part(self, slot: int) -> None:
        """Have a worker end its part, and commit all its steps."""
        writer = self.writing.pop(slot, None)
        if writer is not None:
            writer.end_part()
        self.parts.commit(self.workers[slot].reports())

    def commit(self, slot: int) -> None:
        """Commit the steps of a worker so far."""
        self.parts.commit(self.workers[slot].reports())

    def die(self, slot: int) -> None:
        """Kill a worker; its steps that were not committed are lost."""
        self.writing.pop(slot, None)
        self.workers[slot].close()
        self.parts.grants.lose(self.workers[slot].name, self.now_s + 10)
        self.workers[slot] = self.worker(slot)

    def reserve(self) -> None:
        """Have enough chunks for a part in the pool."""
        self.now_s += 4
        if self.parts.grants.pool_chunks < 40:
            self.parts.commit(reserve=40)

    def finish(self) -> None:
        """Import what is left, and seal."""
        for slot in range(WORKERS):
            self.end_part(slot)
        for part in range(len(COUNTS)):
            self.write(0, part)
            self.end_part(0)
        for worker in self.workers:
            worker.end()
        self.parts.seal()


@cache
def what_a_plain_import_makes() -> object:
    with TemporaryDirectory() as place, fresh(Path(place) / "v.img") as volume:
        import_plainly(volume, COUNTS)
        return everything(volume)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, WORKERS - 1), st.integers(0, len(COUNTS) - 1)),
        st.tuples(st.sampled_from(["end_part", "commit", "die"]), st.integers(0, WORKERS - 1)),
        st.sampled_from([("coordinate",), ("other",)]),
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS)
def test_order_workers_and_deaths_change_nothing(actions: list[tuple[object, ...]]) -> None:
    with TemporaryDirectory() as place, fresh(Path(place) / "v.img") as volume:
        world = World(volume)
        for number, (name, *given_to) in enumerate(actions):
            if name == "other":
                write_dataset(volume, f"other {number}", {b"a": bytes(9000)})
            else:
                getattr(world, str(name))(*given_to)
        world.finish()
        assert everything(volume) == what_a_plain_import_makes()
        check_no_leak(volume)
