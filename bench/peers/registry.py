"""All peers, in the order of the tables."""

from __future__ import annotations

import importlib

from bench.peers.peer import Peer

MODULES: tuple[str, ...] = (
    "ours",
    "files",
    "packed",
    "images",
    "lmdb",
    "hdf5",
    # Formats of other projects.
    "array_record",
    "huggingface",
    "lance",
    "mds",
    "litdata",
    "webdataset",
    "ffcv",
)
"""Modules of this folder with a tuple ``PEERS``."""


def all_peers() -> dict[str, Peer]:
    """Return the peers by name."""
    peers: dict[str, Peer] = {}
    for module in MODULES:
        for peer in importlib.import_module(f"bench.peers.{module}").PEERS:
            assert peer.name not in peers, f"two peers are called {peer.name}"
            peers[peer.name] = peer
    return peers
