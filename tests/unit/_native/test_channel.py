"""Channels: a client's reader is as good as the service's own; limits; either end's death."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dlfs._native import abi
from dlfs._native.abi import CHANNEL_SAMPLES_MAX
from dlfs._native.batch import NativeBatch
from dlfs._native.channel import ChannelDescriptors, ClientReader, ClientStream
from dlfs._native.reader import NativeSequence, NativeStream, StreamOptions
from dlfs._native.server_channel import ENDED_CLOSED, ServerChannel, Share
from dlfs.base.units import KIB, MIB
from dlfs.errors import ClosedError, FormatError, LimitError, ServiceLostError, UsageError
from tests.support.devices import Faults
from tests.support.forked import run_forked
from tests.unit._native.channel_node import (
    COUNT,
    EVERY,
    Node,
    channel_descriptors,
    connect,
    program,
)


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(**options: Any) -> Node:
        made.append(Node(f"{request.node.name}-{len(made)}", **options))
        return made[-1]

    yield make
    gc.collect()  # batches that a failed test still has
    for one in made:
        one.close()


def contents(batch: NativeBatch) -> list[bytes]:
    view = memoryview(batch.memory).cast("B")
    places = zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=True)
    return [bytes(view[at : at + length]) if length >= 0 else b"failed" for at, length in places]


def expected(node: Node, indices: np.ndarray) -> list[bytes]:
    return [node.samples[i] for i in indices.tolist()]


# ---- the same as the reader itself ---------------------------------------------------------------


def test_a_client_reads_what_the_reader_reads(node) -> None:
    one = node()
    client = one.client()
    indices = np.array([5, 3, 5, 599, 0, 17], np.uint64)
    batch = client.read(indices)
    assert contents(batch) == expected(one, indices)
    assert batch.indices.tolist() == indices.tolist()
    assert batch.failures == ()
    assert contents(client.read(EVERY[:0])) == []
    out = np.zeros(8 * KIB, np.uint8)
    single = client.read(indices[1:2])
    single.gather(out, np.array([100], np.uint64))
    assert out[100 : 100 + len(one.samples[3])].tobytes() == one.samples[3]
    with pytest.raises(LimitError):
        single.gather(out[:1], np.array([100], np.uint64))
    with pytest.raises(UsageError):
        client.read(np.array([COUNT], np.uint64))
    assert client.lost_members() == 0
    assert client.member_code(0) == 0
    assert client.member_code(7) < 0
    assert client.stats() == one.reader.stats()
    assert client.member_stats(0) == one.reader.member_stats(0)
    with pytest.raises(UsageError):
        client.member_stats(1)
    assert len(one.channels) == 1
    client.close()


def test_single_samples(node) -> None:
    one = node(memory_bytes=32 * MIB)
    client = one.client(samples_max=1)
    assert client.get(4, flags=abi.GET_CACHED) is None
    assert [client.get(i) for i in range(COUNT)] == list(one.samples)
    assert client.get(4, flags=abi.GET_CACHED) == one.samples[4]
    client.close()


def test_failures_come_with_their_reasons(node) -> None:
    one = node(faults=Faults(bad_first_bytes=MIB + 64 * KIB, bad_length_bytes=32 * KIB))
    client = one.client()
    ours, theirs = client.read(EVERY), one.reader.read(EVERY)
    assert ours.failures
    assert sorted(ours.failures, key=lambda failure: failure.position) == sorted(
        theirs.failures, key=lambda failure: failure.position
    )
    assert contents(ours) == contents(theirs)
    assert client.get(ours.failures[0].index) is None
    client.close()


@pytest.mark.parametrize("order", ["storage", "global", "chunk"])
@pytest.mark.parametrize("plan", ["direct", "chunks", "chunk_copy", "auto"])
def test_an_epoch_through_a_channel(node, order: str, plan: str) -> None:
    one = node()
    client = one.client()
    sequence = one.sequence(order)
    part = {"first": 1, "stride": 2, "count": COUNT // 2, "plan": plan}
    stream = ClientStream(client, sequence, StreamOptions(**part))
    own = NativeStream(one.reader, sequence, StreamOptions(**part))
    assert stream.plan == own.plan
    own.close()
    order_seen: list[int] = []
    while (batch := stream.next(48)) is not None:
        assert contents(batch) == expected(one, batch.indices)
        order_seen += batch.indices.tolist()
    assert order_seen == sequence.fill(1, COUNT // 2, 2).tolist()
    stream.close()
    stream.close()
    with pytest.raises(ClosedError):
        stream.next(1)
    again = ClientStream(
        client, sequence, StreamOptions(first=0, stride=1, count=10)
    )  # on the same channel
    assert again.next(100).indices.tolist() == sequence.fill(0, 10, 1).tolist()
    again.close()
    assert len(one.channels) == 1
    grouped = {"first": 8, "stride": 1, "count": 40, "group": 4, "group_stride": 12}
    stream = ClientStream(client, sequence, StreamOptions(**grouped))
    own = NativeStream(one.reader, sequence, StreamOptions(**grouped))
    assert stream.next(40).indices.tolist() == own.next(40).indices.tolist()
    stream.close()
    own.close()
    with pytest.raises(UsageError):
        ClientStream(client, sequence, StreamOptions(first=COUNT, stride=1, count=1))
    client.close()


@pytest.mark.parametrize("kind", ["list", "selected", "weighted"])
def test_an_epoch_over_chosen_samples(node, kind: str) -> None:
    one = node()
    client = one.client(samples_max=64)  # the indices are sent in pieces
    chosen = np.random.default_rng(1).permutation(COUNT)[:400].astype(np.uint64)
    weights = np.arange(400, dtype=np.float64) if kind == "weighted" else None

    def choose(draws: int) -> NativeSequence:
        return NativeSequence.choose(
            one.directory, kind=kind, indices=chosen, weights=weights, draws=draws, seed=3
        )

    sequence = choose(400)
    for part in (
        {"first": 1, "stride": 3, "count": 133},
        {"first": 8, "stride": 1, "count": 40, "group": 4, "group_stride": 12},
    ):
        stream = ClientStream(client, sequence, StreamOptions(**part))
        own = NativeStream(one.reader, sequence, StreamOptions(**part))
        while (batch := own.next(30)) is not None:
            got = stream.next(30)
            assert got.indices.tolist() == batch.indices.tolist()
            assert contents(got) == expected(one, got.indices)
        assert stream.next(30) is None
        stream.close()
        own.close()
    with pytest.raises(UsageError):
        ClientStream(client, sequence, StreamOptions(first=0, stride=1, count=401))
    if kind == "weighted":  # more draws than there are samples
        drawn = choose(5 * COUNT)
        stream = ClientStream(client, drawn, StreamOptions(first=0, stride=1, count=5 * COUNT))
        order_seen: list[int] = []
        while (batch := stream.next(50)) is not None:
            order_seen += batch.indices.tolist()
        assert order_seen == drawn.fill(0, 5 * COUNT, 1).tolist()
        stream.close()
        many = CHANNEL_SAMPLES_MAX + 1
        with pytest.raises(LimitError, match=f"{many} samples .*: expected at most 1048576 chosen"):
            ClientStream(client, choose(many), StreamOptions(first=0, stride=1, count=many))
    plain = ClientStream(client, one.sequence(), StreamOptions(first=0, stride=1, count=9))
    assert len(plain.next(9).indices) == 9
    plain.close()
    assert len(one.channels) == 1
    client.close()


def test_many_threads_have_a_channel_each_at_most(node) -> None:
    one = node()
    client = one.client(pinned_bytes_max=512 * KIB)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(60):
            indices = random.integers(0, COUNT, 30).astype(np.uint64)
            batch = client.read(indices)
            assert contents(batch) == expected(one, indices)
            assert client.get(int(indices[0])) == one.samples[int(indices[0])]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert 1 <= len(one.channels) <= 6
    one.wait_taken_back()
    client.close()
    one.wait_taken_back(ended=True)
    assert {channel.ended for channel in one.channels} == {ENDED_CLOSED}


# ---- what a client may have ----------------------------------------------------------------------


def test_batches_are_pinned_until_their_last_view_is_gone(node) -> None:
    one = node()
    client = one.client()
    batch = client.read(EVERY[:30])
    view = memoryview(batch.memory)
    first = contents(batch)
    del batch
    client.close()
    assert one.channels[0].stats()["batches_out"] == 1
    assert one.channels[0].stats()["pinned_bytes"] > 0
    assert not one.channels[0].ended
    assert first == expected(one, EVERY[:30])
    del view
    one.wait_taken_back(ended=True)
    assert one.channels[0].stats()["pinned_bytes"] == 0


def test_beyond_its_share_a_client_gets_copies_and_then_a_limit(node) -> None:
    one = node(memory_bytes=512 * KIB)
    client = one.client(pinned_bytes_max=128 * KIB, copied_bytes_max=256 * KIB)
    modest = one.client(pinned_bytes_max=128 * KIB)
    batches = []

    def read_on() -> None:
        for at in range(0, COUNT, 20):
            batches.append(client.read(EVERY[at : at + 20]))
            assert one.channels[0].stats()["pinned_bytes"] <= 128 * KIB

    with pytest.raises(LimitError, match=r"read 20 samples from .*: with the batches still in use"):
        read_on()
    assert one.channels[0].stats()["copied_batches"] > 0
    assert one.channels[0].stats()["refusals"] == 1
    for number, batch in enumerate(batches):
        assert contents(batch) == expected(one, EVERY[20 * number : 20 * number + 20])
    assert contents(modest.read(EVERY[:20])) == expected(one, EVERY[:20])
    batches.clear()
    assert contents(client.read(EVERY[:20])) == expected(one, EVERY[:20])
    with pytest.raises(
        LimitError, match=r"read 131072 samples .*: expected at most \d+ in a batch"
    ):
        modest.read(np.zeros(1 << 17, np.uint64))
    client.close()
    modest.close()


def test_a_stream_goes_on_where_the_limit_stopped_it(node) -> None:
    one = node(memory_bytes=512 * KIB)
    client = one.client(pinned_bytes_max=0, copied_bytes_max=128 * KIB)
    sequence = one.sequence()
    stream = ClientStream(client, sequence, StreamOptions(first=0, stride=1, count=COUNT))
    held: list[NativeBatch] = []
    seen: list[int] = []
    refusals = 0
    while len(seen) < COUNT:
        try:
            batch = stream.next(10)
        except LimitError:
            refusals += 1
            held.clear()
            continue
        assert contents(batch) == expected(one, batch.indices)
        seen += batch.indices.tolist()
        held.append(batch)
    assert refusals > 0
    assert seen == sequence.fill(0, COUNT, 1).tolist()
    stream.close()
    client.close()


def test_a_channel_is_made_of_what_makes_sense(node) -> None:
    one = node()
    own = one.make_reader()
    with pytest.raises(UsageError):
        own.arena()
    with pytest.raises(UsageError):
        ServerChannel(own, Share(MIB))
    with pytest.raises(UsageError):
        ServerChannel(one.reader, Share(MIB), samples_max=0)
    with pytest.raises(UsageError):
        ClientReader(one.reader.arena()[0], one.reader.arena()[1] + 1, lambda: None)
    owner = weakref.ref(own.handle)
    own.close()
    assert owner() is None  # refused channels have not kept it

    def wrong_memory() -> ChannelDescriptors:
        return channel_descriptors(os.dup(one.reader.arena()[0]), socket.socket().detach())

    client = ClientReader(one.reader.arena()[0], one.reader.arena()[1], wrong_memory)
    with pytest.raises(FormatError):
        client.read(EVERY[:1])
    client.close()


# ---- ends ----------------------------------------------------------------------------------------


def test_a_closed_reader_says_so(node) -> None:
    one = node()
    client = one.client()
    stream = ClientStream(client, one.sequence(), StreamOptions(first=0, stride=1, count=COUNT))
    client.read(EVERY[:1])
    client.close()
    client.close()
    for call in (lambda: client.read(EVERY[:1]), lambda: client.get(0), client.stats):
        with pytest.raises(ClosedError):
            call()
    assert stream.next(5).indices.tolist() == one.sequence().fill(0, 5, 1).tolist()
    stream.close()
    one.wait_taken_back(ended=True)


def test_a_channel_that_the_service_closes_is_lost_and_replaced(node) -> None:
    one = node()
    client = one.client()
    batch = client.read(EVERY[:10])
    stream = ClientStream(client, one.sequence(), StreamOptions(first=0, stride=1, count=COUNT))
    for channel in one.channels:
        channel.close()
        channel.close()
        assert channel.stats()["batches_out"] <= 1  # as it was when it was closed
    with pytest.raises(ServiceLostError):
        stream.next(1)
    stream.close()
    assert client.get(3) == one.samples[3]
    assert len(one.channels) == 2
    assert len(batch.lengths) == 10
    client.close()


def test_the_reader_outlives_its_channels(node) -> None:
    one = node()
    client = one.client()
    client.read(EVERY[:10])
    owner = weakref.ref(one.reader.handle)
    one.reader.close()
    assert owner() is not None
    client.close()
    one.wait_taken_back(ended=True)
    one.channels[0].close()
    assert owner() is None


def serve_in_thread(one: Node, connection: socket.socket) -> threading.Thread:
    thread = threading.Thread(target=one.serve, args=(connection,))
    thread.start()
    return thread


def test_a_killed_client_leaves_nothing(node) -> None:
    one = node()
    with program("client") as (process, connection):
        thread = serve_in_thread(one, connection.dup())
        assert process.stdout.readline() == b"holding\n"
        assert len(one.channels) == 2  # one for the stream
        assert sum(channel.stats()["pinned_bytes"] for channel in one.channels) > 0
        process.kill()
        process.wait()
        one.wait_taken_back(ended=True)
    thread.join()
    for channel in one.channels:
        assert channel.ended == ENDED_CLOSED
        assert channel.stats()["pinned_bytes"] == channel.stats()["copied_bytes"] == 0
        channel.close()
    owner = weakref.ref(one.reader.handle)
    one.reader.close()
    assert owner() is None


@pytest.mark.parametrize("role", ["forking-client", "forking-client-closed"])
def test_the_death_of_a_client_with_a_living_child_is_noticed(node, role: str) -> None:
    one = node()
    with program(role) as (process, connection):
        thread = serve_in_thread(one, connection.dup())
        child = int(process.stdout.readline())
        try:
            process.kill()
            process.wait()
            one.wait_taken_back(ended=True)
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)
    thread.join()


def test_a_killed_service_is_noticed_in_the_midst_of_a_call() -> None:
    with program("service") as (process, connection):
        client = connect(connection)
        held = client.read(EVERY[:20])
        before = contents(held)
        begun = threading.Event()

        def work() -> None:
            while True:
                client.read(EVERY[:50])
                begun.set()

        with ThreadPoolExecutor(3) as pool:
            works = [pool.submit(work) for _ in range(3)]
            begun.wait()
            process.kill()
            assert all(isinstance(work.exception(), ServiceLostError) for work in works)
        assert contents(held) == before
        client.close()


def test_a_forked_child_leaves_the_channels_alone(node) -> None:
    one = node()
    client = one.client()
    batch = client.read(EVERY[:5])
    before = contents(batch)

    def use() -> None:
        nonlocal batch
        with pytest.raises(ClosedError):
            client.read(EVERY[:1])
        del batch
        client.close()

    assert run_forked(use) == 0
    assert contents(batch) == before
    assert one.channels[0].stats()["batches_out"] == 1
    assert client.get(2) == one.samples[2]
    client.close()


def test_a_connection_lost_to_a_close_is_no_lost_service(node) -> None:
    client = node().client()

    def close_meanwhile() -> ChannelDescriptors:
        client.close()
        raise ServiceLostError("ask the service: Bad file descriptor")

    client._open_channel = close_meanwhile
    with pytest.raises(ClosedError, match="use a reader: it is closed"):
        client.read(EVERY[:1])
