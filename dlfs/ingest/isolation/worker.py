"""Reads a source in a process of its own, for ``IsolatedSource`` in the process that started it.

The messages to the other process (``messages``) are, in turn: the attributes of the opened source;
each block, whose data is in a shared buffer; the end; and the attributes that reading changed; or
an error. The other process sends pickles, of what its caller gave: the options and paths; layout,
seed, buffer size, samples to leave out and cursor; and the number of each buffer that may be filled
again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

from dlfs.ingest.bad_records import BadRecords, opening
from dlfs.ingest.isolation.confines import confine, read_note
from dlfs.ingest.isolation.memory import SharedMemory
from dlfs.ingest.isolation.messages import (
    End,
    Facts,
    Failure,
    Message,
    block_message,
    encode,
)
from dlfs.ingest.source import SampleBlock, without_first


class _Peer(Connection):
    """The socket to the other process; if that is gone, this one ends at once."""

    def tell(self, message: Message) -> None:
        data = encode(message)
        try:
            self.send_bytes(data)
        except OSError:
            os._exit(0)

    def receive(self) -> Any:
        try:
            return self.recv()
        except (EOFError, OSError):
            os._exit(0)


def serve(peer: _Peer, note: SharedMemory, buffers: Sequence[SharedMemory]) -> None:
    """Open a source, and send its blocks until the other process closes the socket."""
    options, paths, limit = peer.receive()
    try:
        with opening(BadRecords(limit)), closing(options.open(paths)) as source:
            source.bad.expect(source.sample_count)
            peer.tell(Facts.of(source))
            while True:
                layout, seed, source.buffer_bytes, first, cursor = peer.receive()
                first -= source.seek(first, cursor)
                with closing(source.blocks(layout=layout, seed=seed)) as blocks:
                    _send_blocks(peer, buffers, without_first(blocks, first), source.bad)
                peer.tell(End())
                peer.tell(Facts.of(source))
    except Exception as error:  # noqa: BLE001 - of any library
        where = read_note(note.view())[1] or f"import {paths[0]}"
        peer.tell(Failure.of(error, where))
        while True:  # the other process closes the socket when it has read the error
            peer.receive()


def _send_blocks(
    peer: _Peer,
    buffers: Sequence[SharedMemory],
    blocks: Iterable[SampleBlock],
    bad: BadRecords,
) -> None:
    free = list(range(len(buffers)))
    for block in blocks:
        while not free:
            free += peer.receive()
        number = free.pop(0)
        used = block.lengths > 0
        first = int(block.offsets[used].min()) if used.any() else 0
        size_bytes = int((block.offsets + block.lengths)[used].max(initial=first)) - first
        buffers[number].grow(size_bytes)
        buffers[number].array(size_bytes)[:] = block.data[first : first + size_bytes]
        offsets = (block.offsets - first).clip(0, size_bytes)  # of an empty sample, any
        bad.count_good(len(block.paths))
        peer.tell(block_message(number, size_bytes, offsets, block, bad))
    while len(free) < len(buffers):
        free += peer.receive()


def main() -> None:
    """Serve the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    sys.modules["torch"] = None  # type: ignore[assignment]  # adios2 would load it, for seconds
    socket, *memories = map(int, sys.argv[1:])
    note, *buffers = map(SharedMemory, memories)
    confine(note.view())
    serve(_Peer(socket), note, buffers)


if __name__ == "__main__":
    main()
