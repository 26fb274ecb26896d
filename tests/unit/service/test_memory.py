"""How a service's memory is divided among its volumes."""

from __future__ import annotations

import pytest

from dlfs.base.units import KIB, MIB
from dlfs.errors import LimitError
from dlfs.service.memory import MemoryPart, ServiceMemory

CHUNK = 64 * KIB
TOTAL = 64 * MIB


def own(memory: ServiceMemory, capacity_bytes: int = TOTAL, size: int | None = None) -> MemoryPart:
    """Add a volume with a rule."""
    return memory.add_volume(
        CHUNK, "v.img", own=True, capacity_bytes=capacity_bytes, part_bytes=size
    )


def size(part: MemoryPart) -> int:
    """Return the bytes of a part, of which a dataset is opened."""
    part.arena(part.chunk_bytes)
    return part.stats()["memory_bytes"]


def test_one_volume_has_all_of_it() -> None:
    memory = ServiceMemory(TOTAL)
    parts = [memory.add_volume(CHUNK, name) for name in ("a.img", "b.img")]
    assert parts[0] is parts[1]
    assert size(parts[0]) == TOTAL
    assert memory.stats() == {"memory_bytes": TOTAL, "held_bytes": 0, "readers": 0}
    with pytest.raises(LimitError, match=r"expected 256\.0 KiB .* 0 B of 64\.0 MiB are left"):
        own(memory)
    assert memory.add_volume(CHUNK, "c.img") is parts[0]


def test_volumes_that_are_known_divide_it_equally() -> None:
    memory = ServiceMemory(TOTAL)
    shared = memory.add_volume(CHUNK, "a.img")
    parts = [own(memory) for _ in range(3)]
    assert [size(part) for part in (*parts, shared)] == [TOTAL // 4] * 4


def test_a_part_is_left_to_volumes_that_come() -> None:
    memory = ServiceMemory(TOTAL, expects_volumes=True)
    sizes = [size(own(memory)) for _ in range(3)]
    assert sizes == [TOTAL // 2, TOTAL // 4, TOTAL // 8]


def test_a_volume_that_goes_gives_its_part_back() -> None:
    memory = ServiceMemory(TOTAL, expects_volumes=True)
    for _ in range(20):
        first, second = own(memory), own(memory)
        assert size(first) == size(second) == TOTAL // 3
        for part in (first, second):
            memory.remove_volume(part)


def test_a_small_volume_takes_what_it_can_fill() -> None:
    memory = ServiceMemory(1024 * MIB, expects_volumes=True)
    assert size(own(memory, capacity_bytes=8 * MIB)) == (8 + 2 + 64) * MIB
    assert size(own(memory)) <= (1024 - 74) * MIB // 2


def test_a_size_that_is_given_is_reserved_at_once() -> None:
    memory = ServiceMemory(TOTAL)
    part = own(memory, size=40 * MIB)
    with pytest.raises(LimitError, match=r"expected 40\.0 MiB .* 24\.0 MiB of 64\.0 MiB are left"):
        own(memory, size=40 * MIB)
    assert size(memory.add_volume(CHUNK, "a.img")) == 24 * MIB
    assert size(part) == 40 * MIB
