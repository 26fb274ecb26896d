"""A peer put through what the framework asks of it, in a process of its own: prints what it saw.

    python -m tests.bench.peer_child MODULE NAME FOLDER

Prints what was read and found right. A peer that refuses samples of odd sizes (``refused`` is its
reason) is given even ones; one that refuses these, too, is ``unavailable``.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np

from bench.datasets import Source
from bench.errors import Unavailable
from bench.peers.peer import PAGE_BYTES, Peer, Reader

COUNT = 500
BATCH = 64


class OddSource(Source):
    """Samples of odd sizes, empty ones, one of 300 kB; paths that are long and not UTF-8.

    Args:
        even: all samples have one size instead.
    """

    def __init__(self, even: bool = False) -> None:
        random = np.random.default_rng(5)
        self.lengths = random.integers(1, 3 * PAGE_BYTES, COUNT)
        self.lengths[[0, 17, 18, COUNT - 1]] = 0
        self.lengths[19:22] = 1, PAGE_BYTES, 300_001
        if even:
            self.lengths[:] = PAGE_BYTES
        self._data = [random.bytes(length) for length in self.lengths.tolist()]

    def path(self, index: int) -> bytes:
        return b"%06d" % index + b"/" + b"\xff name" * 30

    def data(self, index: int) -> bytes:
        return self._data[index]


def read_at_random(reader: Reader, source: OddSource) -> int:
    """An epoch by a permutation, and one sample alone; how many there were."""
    order = np.random.default_rng(6).permutation(COUNT).tolist()
    batches = [order[start : start + BATCH] for start in range(0, COUNT, BATCH)]
    for batch in [*batches, [21], [0]]:
        found = reader.read(batch)
        assert [bytes(found[at]) for at in range(len(found))] == [source.data(i) for i in batch]
        if not isinstance(found, list):
            assert found.lengths.tolist() == [len(source.data(index)) for index in batch]
    return len(order)


def read_epoch(reader: Reader, source: OddSource, seed: int) -> list[int]:
    """An epoch in the peer's own order; the indices in that order."""
    seen: list[int] = []
    for indices, batch in reader.epoch(seed, BATCH):
        assert len(indices) == len(batch)
        pairs = [(int(index), bytes(batch[at])) for at, index in enumerate(indices)]
        assert 0 < len(pairs) <= BATCH
        assert all(data == source.data(index) for index, data in pairs)
        seen += [index for index, _ in pairs]
    assert sorted(seen) == list(range(COUNT))
    return seen


def exercise(peer: Peer, folder: Path, source: OddSource) -> dict[str, object]:
    """Prepare, open twice, read, leave an epoch in its middle."""
    peer.prepare(source, folder)
    prepared = {path for path in folder.rglob("*") if path.is_file()}
    peer.open(folder).close()
    reader, other = peer.open(folder), peer.open(folder)
    found: dict[str, object] = {"own_order": reader.own_order}
    if peer.random:
        found["random"] = read_at_random(reader, source)
        read_at_random(other, source)
    if reader.own_order:
        orders = [read_epoch(reader, source, seed) for seed in (1, 1, 2)]
        found["shuffled"] = orders[0] != list(range(COUNT))
        found["seeds"] = orders[0] != orders[2]
        left = reader.epoch(3, BATCH)
        next(left)
        left.close()
    other.close()
    reader.close()
    reader.close()
    after = {path for path in folder.rglob("*") if path.is_file() and path.stat().st_size}
    found["left"] = sorted(str(path) for path in after - prepared)
    return found


def main() -> None:
    module, name, folder = sys.argv[1:]
    (peer,) = (p for p in importlib.import_module(module).PEERS if p.name == name)
    found: dict[str, object] = {}
    for even in (False, True):
        try:
            found |= exercise(peer, Path(folder), OddSource(even))
            break
        except Unavailable as reason:
            found["refused" if not even else "unavailable"] = str(reason)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
