"""Reads a source in a process of its own, for ``IsolatedSource`` in the process that started it.

Messages to the other process are pairs: ``ok`` and a content, or ``error`` and what ``_error``
takes. The contents are, in turn: the attributes of the opened source; for each block the number of
its buffer, the size of the data, paths, offsets, lengths and attributes; None at the end; and the
attributes that reading changed. The other process sends the options and paths; layout, seed and
buffer size; and the number of each buffer that may be filled again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

from dlfs.errors import DeviceError, DlfsError, FormatError
from dlfs.ingest.isolation.confines import confine, read_note
from dlfs.ingest.isolation.memory import SharedMemory
from dlfs.ingest.source import SampleBlock, Source


class _Peer:
    """The other process; if it is gone, this one ends at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, kind: str, content: object) -> None:
        try:
            self._connection.send((kind, content))
        except OSError:
            os._exit(0)

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            os._exit(0)


def serve(peer: _Peer, note: SharedMemory, buffers: Sequence[SharedMemory]) -> None:
    """Open a source, and send its blocks until the other process closes the socket."""
    options, paths = peer.receive()
    try:
        with closing(options.open(paths)) as source:
            peer.send("ok", _facts(source))
            while True:
                layout, seed, source.buffer_bytes = peer.receive()
                with closing(source.blocks(layout=layout, seed=seed)) as blocks:
                    _send_blocks(peer, buffers, blocks)
                peer.send("ok", None)
                peer.send("ok", _facts(source))
    except Exception as error:  # noqa: BLE001 - of any library
        where = read_note(note.view())[1] or f"import {paths[0]}"
        peer.send("error", _describe(error, where))
        while True:  # the other process closes the socket when it has read the error
            peer.receive()


def _facts(source: Source) -> dict[str, Any]:
    """Return the attributes of a source, as the other process takes them."""
    return {
        "name": source.name,
        "sample_count": source.sample_count,
        "sample_bytes": source.sample_bytes,
        "gives_shuffled": source.gives_shuffled,
        "skipped": dict(source.skipped),
        "left_out": source.left_out,
        "empty_directories": source.empty_directories,
        "buffer_bytes": source.buffer_bytes,
    }


def _send_blocks(
    peer: _Peer, buffers: Sequence[SharedMemory], blocks: Iterable[SampleBlock]
) -> None:
    free = list(range(len(buffers)))
    for block in blocks:
        while not free:
            free += peer.receive()
        number = free.pop(0)
        first, size_bytes = _extent(block)
        buffers[number].grow(size_bytes)
        buffers[number].array(size_bytes)[:] = block.data[first : first + size_bytes]
        offsets = (block.offsets - first).clip(0, size_bytes)  # of an empty sample, any
        message = (number, size_bytes, block.paths, offsets, block.lengths, block.attributes)
        peer.send("ok", message)
    while len(free) < len(buffers):
        free += peer.receive()


def _extent(block: SampleBlock) -> tuple[int, int]:
    """Return the offset and size of the bytes that the samples of a block use."""
    used = block.lengths > 0
    if not used.any():
        return 0, 0
    first = int(block.offsets[used].min())
    return first, int((block.offsets[used] + block.lengths[used]).max()) - first


def _describe(error: Exception, where: str) -> tuple[str, str, int | None, list[str]]:
    """Return an error's class, text, errno and notes; other errors than ours are of the file."""
    if not isinstance(error, DlfsError):
        kind = type(error).__name__
        text = f"{where}: expected a readable file, got {kind}: {' '.join(str(error).split())}"
        return FormatError.__name__, text, None, []
    code = error.errno if isinstance(error, DeviceError) else None
    return type(error).__name__, str(error), code, list(getattr(error, "__notes__", []))


def main() -> None:
    """Serve the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    sys.modules["torch"] = None  # type: ignore[assignment]  # adios2 would load it, for seconds
    socket, *memories = map(int, sys.argv[1:])
    note, *buffers = map(SharedMemory, memories)
    confine(note.view())
    serve(_Peer(Connection(socket)), note, buffers)


if __name__ == "__main__":
    main()
