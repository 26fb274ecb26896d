"""The search tree of a directory segment, walked as FORMAT.md section 6 says.

What decoder.py leaves out. It takes the entries part, whose checksums someone else has checked, and
finds paths by their hashes. Only the hash function is not its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import xxhash

NODE = 16


class Tree:
    """The tree of one directory segment."""

    def __init__(self, entries: bytes, names: list[bytes]) -> None:
        self.names = names
        (self.seed, index_bytes, self.level_count) = struct.unpack_from("<QII", entries, 48)
        leaves, leaf_count, separators, separator_count = struct.unpack_from("<4Q", entries, 128)
        index = "I" if index_bytes == 4 else "Q"
        self.empty = (1 << 8 * index_bytes) - 1
        leaf = struct.Struct(f"<16I16{index}")
        self.leaves = [leaf.unpack_from(entries, leaves + leaf.size * i) for i in range(leaf_count)]
        keys = struct.unpack_from(f"<{separator_count}Q", entries, separators)
        self.levels: list[tuple[int, ...]] = []
        count, at = leaf_count, 0
        for _ in range(self.level_count):
            self.levels.append(keys[at : at + count])
            padding = -count % NODE
            assert set(keys[at + count : at + count + padding]) <= {(1 << 64) - 1}
            at += count + padding
            count = -(-count // NODE)
        assert at == separator_count
        assert count <= 1

    def hash(self, path: bytes) -> int:
        return xxhash.xxh64_intdigest(path, seed=self.seed)

    def leaf_of(self, value: int) -> int:
        """The leaf that a hash leads to, from the root down."""
        node = 0
        for level in reversed(self.levels):
            below = range(NODE * node, min(NODE * node + NODE, len(level)))
            fitting = [i for i in below if level[i] <= value]
            node = fitting[-1] if fitting else below[0]
        return node

    def candidates(self, value: int) -> Iterator[int]:
        leaf = self.leaf_of(value)
        straddles = leaf > 0 and self.levels[0][leaf] == value
        for slots in self.leaves[leaf - 1 if straddles else leaf : leaf + 1]:
            for fingerprint, index in zip(slots[:NODE], slots[NODE:], strict=True):
                if fingerprint == value & 0xFFFFFFFF and index != self.empty:
                    yield index

    def find(self, path: bytes) -> int | None:
        if not self.leaves:
            return None
        found = [i for i in self.candidates(self.hash(path)) if self.names[i] == path]
        return found[0] if found else None

    def indices(self) -> list[int]:
        """All indices in leaf order, which is that of (hash, index)."""
        slots = [index for leaf in self.leaves for index in leaf[NODE:]]
        return [index for index in slots if index != self.empty]
