"""A small service over channels, its client, and programs that are one or the other.

``python -m tests.unit._native.channel_node ROLE FD``: FD is the connection to the other side.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np

from dlfs._native import abi
from dlfs._native.arena import NativeArena
from dlfs._native.channel import ChannelDescriptors, ClientReader, ClientStream
from dlfs._native.directory import NativeDirectory
from dlfs._native.reader import NativeReader, NativeSequence, StreamOptions
from dlfs._native.server_channel import ServerChannel, Share
from dlfs.base.units import KIB, MIB
from dlfs.block.memory import MemoryDevice
from dlfs.errors import ServiceLostError
from tests.support.datasets import LaidDataset, lay_dataset, random_samples
from tests.support.devices import Faults, FaultyNativeDevice

CHUNK_BYTES = 16 * KIB
COUNT = 600
EVERY = np.arange(COUNT, dtype=np.uint64)


class Node:
    """A dataset in memory and a reader of it whose memory is shared."""

    def __init__(self, name: str, *, faults: Faults | None = None, memory_bytes: int = MIB) -> None:
        self.device = MemoryDevice(f"{name}-{os.getpid()}", 32 * MIB, writable=True)
        samples = random_samples(COUNT, 3)
        self.laid: LaidDataset = lay_dataset([self.device], samples, chunk_bytes=CHUNK_BYTES)
        self.samples = self.laid.samples
        native = self.device.native
        self.native = FaultyNativeDevice(native, faults, uri="mem:") if faults else native
        self.reader = self.make_reader(memory_bytes, shared=True)
        self.channels: list[ServerChannel] = []

    def make_reader(self, memory_bytes: int = MIB, *, shared: bool = False) -> NativeReader:
        geometry = self.laid.geometry
        return NativeReader(
            [self.native],
            [(run.first_chunk, run.chunk_count) for run in self.laid.runs],
            self.directory,
            abi.ReaderConfig(
                chunk_bytes=geometry.chunk_bytes,
                block_bytes=geometry.block_bytes,
                data_offset_bytes=geometry.data_offset_bytes,
                memory_bytes=memory_bytes,
                gap_bytes=8 * KIB,
                depth=16,
                retry_count=1,
                timeout_ms=20_000,
                replicas=1,
            ),
            arena=NativeArena(memory_bytes, geometry.chunk_bytes, shared=True) if shared else None,
        )

    @property
    def directory(self) -> NativeDirectory:
        return self.laid.directory

    def sequence(self, order: str = "global", **options: int) -> NativeSequence:
        return sequence_of(self.directory, order, **options)

    def channel(self, share: Share, **options: int) -> ChannelDescriptors:
        channel = ServerChannel(self.reader, share, **options)
        self.channels.append(channel)
        return channel.descriptors

    def client(self, *, pinned_bytes_max: int = MIB, **options: int) -> ClientReader:
        """A client in this process."""
        share = Share(pinned_bytes_max)
        return ClientReader(
            self.reader.arena()[0],
            self.reader.arena()[1],
            lambda: self.channel(share, **options),
        )

    def serve(self, connection: socket.socket) -> None:
        """Give the client on the other side what it asks for, until it is gone."""
        share = Share(MIB)
        with contextlib.suppress(OSError), connection:
            size = str(self.reader.arena()[1]).encode()
            socket.send_fds(connection, [size], [self.reader.arena()[0]])
            while connection.recv(1):
                with self.channel(share) as made:
                    socket.send_fds(connection, [b"c"], [made.memory.value, made.wake.value])

    def wait_taken_back(self, *, ended: bool = False) -> None:
        """Wait until no client has anything of the reader, or until every channel has ended."""
        for channel in self.channels:
            while channel.stats()["batches_out"] or (ended and not channel.ended):
                os.sched_yield()

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.reader.close()
        self.device.close()
        MemoryDevice.forget(self.device.name)


def sequence_of(directory: NativeDirectory, order: str, **options: int) -> NativeSequence:
    options = {"seed": 5, "epoch": 2, "window_chunks": 4, **options}
    return NativeSequence(directory, chunk_bytes=CHUNK_BYTES, order=order, **options)


def channel_descriptors(memory: int, wake: int) -> ChannelDescriptors:
    """Return owners of the descriptors of a channel."""
    made = ChannelDescriptors()
    made.memory.value, made.wake.value = memory, wake
    return made


def connect(connection: socket.socket) -> ClientReader:
    """The client of the service on the other side."""
    size, (arena,), *_ = socket.recv_fds(connection, 64, 1)

    def open_channel() -> ChannelDescriptors:
        try:
            connection.send(b"c")
            _, (memory, wake), *_ = socket.recv_fds(connection, 1, 2)
        except (OSError, ValueError) as error:
            raise ServiceLostError("open a channel: the service has hung up") from error
        return channel_descriptors(memory, wake)

    with os.fdopen(arena):
        return ClientReader(arena, int(size), open_channel)


@contextlib.contextmanager
def program(role: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """Another process in a role; killed at the end if it is still there."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", __name__, role, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE) as process:
        theirs.close()
        try:
            with ours:
                yield process, ours
        finally:
            process.kill()


def say(line: str) -> None:
    print(line, flush=True)


def run_service(connection: socket.socket) -> None:
    Node("service").serve(connection)


def run_client(connection: socket.socket) -> None:
    """Hold batches and a stream, and be in a call at any moment."""
    reader = connect(connection)
    held = [reader.read(EVERY[at : at + 20]) for at in (0, 100, 200)]
    directory = Node("client").directory
    stream = ClientStream(
        reader, sequence_of(directory, "global"), StreamOptions(first=0, stride=1, count=COUNT)
    )
    held.append(stream.next(7))
    held.append(reader.read(EVERY[:50]))
    say("holding")
    while True:
        reader.read(EVERY[:50])


def run_forking_client(connection: socket.socket, *, closed: bool = False) -> None:
    """A client whose child outlives it; with a batch, and maybe without what it came from."""
    reader = connect(connection)
    held = reader.read(EVERY[:20])
    if closed:
        reader.close()
    child = os.fork()
    if child == 0:
        connection.close()
        signal.pause()
    say(str(child))
    threading.Event().wait()
    del held


ROLES = {
    "service": run_service,
    "client": run_client,
    "forking-client": run_forking_client,
    "forking-client-closed": functools.partial(run_forking_client, closed=True),
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](socket.socket(fileno=int(sys.argv[2])))
