"""Epochs: every index once, right bytes, under every plan, memory and fault; resumption."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

import numpy as np
import pytest

from dlfs.base.units import KIB, MIB
from dlfs.errors import ChecksumError, ClosedError, UsageError
from tests.support.datasets import random_samples
from tests.support.descriptors import own_threads
from tests.support.devices import Faults, FaultyNativeDevice
from tests.support.waiting import wait_for
from tests.unit.reader.conftest import CHUNK_BYTES, batches_of

PLANS = ("direct", "chunks", "chunk_copy")


def run(epoch, samples) -> list[int]:
    """Takes an epoch to its end, checks the bytes, returns the order."""
    order: list[int] = []
    for batch in epoch:
        assert batch.to_list() == [samples[i] for i in batch.indices.tolist()]
        order += batch.indices.tolist()
    return order


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shuffle", ["global", "chunk", None])
@pytest.mark.parametrize("memory_bytes", [64 * KIB, 400 * KIB, 16 * MIB])
def test_every_index_once(bench, plan, shuffle, memory_bytes):
    made = bench(random_samples(900), members=2)
    with made.reader(memory_bytes=memory_bytes) as reader:
        for epoch in (0, 1):
            batches = batches_of(reader, 64, seed=5, epoch=epoch, shuffle=shuffle, plan=plan)
            order = run(batches, made.laid.samples)
            assert sorted(order) == list(range(900))
        stats = reader.stats()
        assert stats["samples"] >= 1800
        assert stats["checksum_errors"] == 0


@pytest.mark.parametrize("plan", PLANS)
def test_the_order_does_not_depend_on_plan_memory_or_batch(bench, plan):
    made = bench(random_samples(300))
    with made.reader(memory_bytes=16 * MIB) as reader:
        expected = run(batches_of(reader, 300, seed=1), made.laid.samples)
    with made.reader(memory_bytes=100 * KIB) as reader:
        assert run(batches_of(reader, 7, seed=1, plan=plan), made.laid.samples) == expected


@pytest.mark.parametrize(("chunks_kept", "read_at_most"), [(64, 1.1), (43, 5.0), (32, 5.0)])
def test_a_window_larger_than_memory_is_not_read_chunk_by_chunk(bench, chunks_kept, read_at_most):
    made = bench({b"%d" % i: os.urandom(1000) for i in range(6000)})
    with made.reader(memory_bytes=chunks_kept * CHUNK_BYTES) as reader:
        epoch = batches_of(reader, 16, seed=2, shuffle="chunk", window_chunks=64)
        assert sorted(run(epoch, made.laid.samples)) == list(range(6000))
        assert (epoch.plan == "chunks") == (chunks_kept == 64)
        read_bytes = reader.stats()["read_bytes"]
        assert read_bytes <= read_at_most * 6000 * 1000


def test_a_window_larger_than_the_dataset_is_a_global_order_to_the_planner(bench):
    made = bench({b"%d" % i: os.urandom(1000) for i in range(6000)})
    with made.reader(memory_bytes=128 * CHUNK_BYTES) as reader:
        wide = batches_of(reader, 16, seed=2, shuffle="chunk", window_chunks=1 << 20)
        assert wide.plan == batches_of(reader, 16, seed=2, shuffle="global").plan == "chunk_copy"


def test_chunk_copy_with_little_memory_does_not_read_for_nothing(bench):
    count, memory_chunks = 6000, 32
    made = bench({b"%d" % i: os.urandom(400) for i in range(count)})
    with made.reader(memory_bytes=memory_chunks * CHUNK_BYTES) as reader:
        order = run(batches_of(reader, 64, seed=1, plan="chunk_copy"), made.laid.samples)
        assert sorted(order) == list(range(count))
        stats = reader.stats()
    per_chunk = CHUNK_BYTES / 400
    fits = memory_chunks * per_chunk
    # A read gives what it brings of the look-ahead, which can hardly be as long as memory is large.
    assert stats["read_bytes"] <= CHUNK_BYTES * count / (0.6 * per_chunk * fits / count)
    assert stats["private_batches"] == 0


def test_batches_of_large_samples_leave_memory_for_the_next(bench):
    made = bench({b"%d" % i: os.urandom(7000) for i in range(2000)})
    with made.reader(memory_bytes=128 * CHUNK_BYTES) as reader:  # three batches, or four
        order = run(batches_of(reader, 40, seed=1, plan="direct"), made.laid.samples)
        assert sorted(order) == list(range(2000))
        stats = reader.stats()
        assert stats["private_batches"] == 0
        assert stats["read_bytes"] <= 2000 * 12 * KIB  # nothing was read for nothing


@pytest.mark.parametrize("plan", PLANS)
def test_samples_larger_than_a_chunk(bench, plan):
    made = bench(random_samples(80, high=60 * KIB))
    for memory_bytes in (64 * KIB, 512 * KIB, 16 * MIB):
        with made.reader(memory_bytes=memory_bytes) as reader:
            order = run(batches_of(reader, 9, plan=plan), made.laid.samples)
            assert sorted(order) == list(range(80))


@pytest.mark.parametrize("plan", PLANS)
def test_pinned_batches_never_stop_an_epoch(bench, plan):
    made = bench(random_samples(600, low=100))
    with made.reader(memory_bytes=128 * KIB) as reader:
        kept = list(batches_of(reader, 32, plan=plan))
        order = [i for batch in kept for i in batch.indices.tolist()]
        assert sorted(order) == list(range(600))
        assert [bytes(view) for batch in kept for view in batch] == [
            made.laid.samples[i] for i in order
        ]
        assert reader.stats()["private_batches"] > 0


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("memory_bytes", [96 * KIB, 16 * MIB])
def test_faults_on_the_way(bench, plan, memory_bytes):
    made = bench(random_samples(500), members=2)
    config = Faults(
        seed=3,
        error_per_million=40_000,
        short_per_million=20_000,
        flip_per_million=40_000,
        stall_per_million=5_000,
        stall_ms=2,
        reorder=1,
    )
    natives = [FaultyNativeDevice(device.native, config, uri=device.uri) for device in made.devices]
    with made.reader(natives, memory_bytes=memory_bytes, retry_count=30) as reader:
        order = run(batches_of(reader, 32, plan=plan), made.laid.samples)
        assert sorted(order) == list(range(500))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("memory_bytes", [96 * KIB, 16 * MIB])
def test_bad_samples_follow_the_policy(bench, plan, memory_bytes):
    made = bench(random_samples(400, low=20))
    bad = {13, 14, 200, 399}
    for index in bad:
        made.corrupt(index)
    with made.reader(memory_bytes=memory_bytes) as reader:
        with pytest.raises(ChecksumError, match="sample"):
            run(batches_of(reader, 16, plan=plan), made.laid.samples)
        epoch = batches_of(reader, 16, plan=plan, on_error="skip")
        order = run(epoch, made.laid.samples)
        assert sorted(order) == [i for i in range(400) if i not in bad]
        assert epoch.failure_count == 4
        assert {failure.index for failure in epoch.failures} == bad
        epoch = batches_of(reader, 16, plan=plan, on_error="replace")
        order = run(epoch, made.laid.samples)
        assert len(order) == 400
        assert set(order) == set(range(400)) - bad
        assert sorted(order).count(15) == 3  # itself, and in place of 13 and 14
        assert sorted(order).count(0) == 2  # in place of 399


@pytest.mark.parametrize("plan", PLANS)
def test_a_batch_that_was_an_error_is_the_next_one_again(bench, plan):
    made = bench(random_samples(100, low=20))
    made.corrupt(40)
    with made.reader(memory_bytes=96 * KIB) as reader:
        epoch = batches_of(reader, 10, shuffle=None, plan=plan)
        order: list[int] = []
        errors = 0
        for batch in iter(lambda: _next_or_error(epoch), None):
            if isinstance(batch, ChecksumError):
                errors += 1
                assert epoch.state()["position"] == len(order)
                if errors == 2:
                    made.corrupt(40)  # the same bit again: it is as it was
            else:
                order += batch.indices.tolist()
        assert errors == 2
        assert sorted(order) == list(range(100))


def _next_or_error(epoch):
    try:
        return next(epoch, None)
    except ChecksumError as error:
        return error


@pytest.mark.parametrize("plan", PLANS)
def test_a_bad_block_costs_only_its_samples(bench, plan):
    made = bench(random_samples(300, low=100))
    address = int(made.laid.directory.addresses([77])[0])
    _, offset = made.member_offset(address)
    config = Faults(bad_first_bytes=offset // 4096 * 4096, bad_length_bytes=4096)
    natives = [FaultyNativeDevice(device.native, config, uri=device.uri) for device in made.devices]
    with made.reader(natives, memory_bytes=96 * KIB) as reader:
        epoch = batches_of(reader, 16, plan=plan, on_error="skip")
        order = run(epoch, made.laid.samples)
        failed = {failure.index for failure in epoch.failures}
        assert 77 in failed
        assert len(failed) < 20  # those of one block, not of a chunk
        assert sorted([*order, *failed]) == list(range(300))


@pytest.mark.parametrize("shuffle", ["global", "chunk", None])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_share_one_global_order(bench, shuffle, world_size):
    made = bench(random_samples(500))
    with made.reader() as reader:
        expected = run(batches_of(reader, 500, seed=9, shuffle=shuffle), made.laid.samples)
        shared: list[int] = [-1] * 500
        for rank in range(world_size):
            epoch = batches_of(
                reader, 11, seed=9, shuffle=shuffle, rank=rank, world_size=world_size
            )
            shared[rank::world_size] = run(epoch, made.laid.samples)
        assert shared == expected


def test_drop_last_gives_every_rank_the_same_number_of_full_batches(bench):
    made = bench(random_samples(500))
    with made.reader() as reader:
        for rank in range(3):
            epoch = batches_of(reader, 16, rank=rank, world_size=3, drop_last=True)
            assert len(epoch) == 10
            sizes = [len(batch) for batch in epoch]
            assert sizes == [16] * 10
        assert len(batches_of(reader, 16)) == 32


@pytest.mark.parametrize("shuffle", ["global", "chunk", None])
def test_resume_at_another_world_size(bench, shuffle):
    made = bench(random_samples(600))
    with made.reader() as reader:
        expected = run(batches_of(reader, 600, seed=4, epoch=2, shuffle=shuffle), made.laid.samples)
        taken: list[int] = [-1] * 240
        states = []
        for rank in range(4):
            epoch = batches_of(
                reader, 20, seed=4, epoch=2, shuffle=shuffle, rank=rank, world_size=4
            )
            taken[rank::4] = [i for _ in range(3) for i in next(epoch).indices.tolist()]
            states.append(json.loads(json.dumps(epoch.state())))
            epoch.close()
        assert all(state == states[0] for state in states)
        rest: list[int] = [-1] * 360
        for rank in range(3):
            epoch = batches_of(reader, 7, rank=rank, world_size=3).resume(states[0])
            rest[rank::3] = run(epoch, made.laid.samples)
        assert taken + rest == expected


@pytest.mark.parametrize("shuffle", ["global", "chunk", None])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_batches_of_workers_taken_in_turn_are_those_of_one(bench, shuffle, drop_last, workers):
    made = bench(random_samples(230))
    arguments = {"seed": 6, "shuffle": shuffle, "drop_last": drop_last, "world_size": 2}
    with made.reader() as reader:
        for rank in range(2):
            one = batches_of(reader, 11, rank=rank, **arguments)
            state = {**one.state(), "position": 15}  # not a multiple of anything
            expected = [
                (batch.indices.tolist(), one.state()["position"]) for batch in one.resume(state)
            ]
            epochs = [
                batches_of(reader, 11, rank=rank, worker=worker, workers=workers, **arguments)
                for worker in range(workers)
            ]
            lengths = [len(epoch.resume(state)) for epoch in epochs]
            assert [epoch.state() for epoch in epochs] == [state] * workers
            assert sum(lengths) == len(expected)
            got = []
            for number in range(len(expected)):
                epoch = epochs[number % workers]
                batch = next(epoch)
                assert batch.to_list() == [made.laid.samples[i] for i in batch.indices.tolist()]
                got.append((batch.indices.tolist(), epoch.state()["position"]))
            assert got == expected
            assert all(next(epoch, None) is None for epoch in epochs)
            assert [len(epoch) for epoch in epochs] == [0] * workers


def test_a_worker_reads_a_bad_batch_again(bench):
    made = bench(random_samples(100, low=20))
    with made.reader() as reader:
        order = [i for batch in batches_of(reader, 10, seed=2) for i in batch.indices.tolist()]
    made.corrupt(order[35])
    with made.reader() as reader:
        epoch = batches_of(reader, 10, seed=2, worker=1, workers=2)
        assert next(epoch).indices.tolist() == order[10:20]
        for _ in range(2):
            with pytest.raises(ChecksumError):
                next(epoch)
            assert epoch.state()["position"] == 20
        made.corrupt(order[35])  # the same bit again: it is as it was
        assert next(epoch).indices.tolist() == order[30:40]
        assert epoch.state()["position"] == 40


def test_resume_refuses_a_state_that_is_not_its_own(bench):
    made = bench(random_samples(10))
    with made.reader() as reader:
        epoch = batches_of(reader, 2)
        state = epoch.state()
        for bad in ({}, {**state, "version": 9}, {**state, "seed": -1}, {**state, "x": 1}, None):
            with pytest.raises(UsageError):
                epoch.resume(bad)
        with pytest.raises(UsageError, match="of another version or dataset: expected dataset"):
            epoch.resume({**state, "dataset": "other"})
        with pytest.raises(UsageError, match="position"):
            epoch.resume({**state, "position": 11})
        for arguments in (
            {"batch_size": 1, "worker": 1},
            {"batch_size": 1, "worker": -1, "workers": 2},
            {"batch_size": 1, "workers": 0},
            {"batch_size": 0},
            {"batch_size": 1, "rank": 1},
            {"batch_size": 1, "world_size": 0},
            {"batch_size": 1, "shuffle": "yes"},
            {"batch_size": 1, "seed": -1},
            {"batch_size": 1, "window_chunks": 0},
        ):
            with pytest.raises(UsageError):
                batches_of(reader, **arguments)


def test_a_closed_epoch_says_so(bench):
    made = bench(random_samples(50))
    with made.reader() as reader:
        with batches_of(reader, 5) as epoch:
            batch = next(epoch)
        with pytest.raises(ClosedError):
            next(epoch)
        assert batch.to_list() == [made.laid.samples[i] for i in batch.indices.tolist()]


def test_an_empty_dataset_has_no_batches(bench):
    made = bench({})
    with made.reader() as reader:
        for shuffle in ("global", "chunk", None):
            assert list(batches_of(reader, 4, shuffle=shuffle)) == []


def test_epochs_and_reads_together(bench):
    made = bench(random_samples(400))
    with made.reader(memory_bytes=256 * KIB) as reader:
        first = batches_of(reader, 16, seed=1)
        second = batches_of(reader, 16, seed=2, shuffle="chunk")
        random = np.random.default_rng(0)
        for one, two in zip(first, second, strict=True):
            indices = random.integers(0, 400, 10)
            assert reader.read(indices).to_list() == [made.laid.samples[i] for i in indices]
            for batch in (one, two):
                assert batch.to_list() == [made.laid.samples[i] for i in batch.indices.tolist()]


def test_nothing_is_left_behind(bench):
    made = bench(random_samples(400))

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(own_threads())

    with made.reader() as reader:
        run(batches_of(reader, 16), made.laid.samples)
    descriptors, threads = count()
    for seed in range(20):
        with made.reader() as reader:
            epoch = batches_of(reader, 16, seed=seed)
            next(epoch)
            epoch.close()
    # A thread that was joined is listed until the kernel has removed it.
    wait_for(lambda: count()[1] <= threads, f"no more than {threads} threads")
    assert count()[0] <= descriptors


class Alarmed(Exception):
    """A signal handler has run."""


def _interrupt(action, calls: int) -> bool:
    """Raise as a signal handler does, where a Python function is called for the n-th time.

    Returns:
        whether the action came so far.
    """
    left = calls

    def tracer(_frame: object, event: str, _argument: object) -> None:
        nonlocal left
        if event == "call":
            left -= 1
            if left < 0:
                raise Alarmed

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        action()
    except Alarmed:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_first_batch_and_a_resume_may_be_interrupted_anywhere(bench):
    made = bench(random_samples(20))
    with made.reader() as reader:
        with batches_of(reader, 4, seed=1) as whole:
            expected = [batch.indices.tolist() for batch in whole]
        with batches_of(reader, 4, seed=1) as third:
            next(third)
            next(third)
            state = third.state()
        calls, comes = 0, True
        while comes:
            with batches_of(reader, 4, seed=1) as epoch:
                comes = _interrupt(lambda epoch=epoch: next(epoch), calls)
                found = [batch.indices.tolist() for batch in epoch]
                assert found == (expected if comes else expected[1:]), calls
            calls += 1
        assert calls > 10
        calls, comes = 0, True
        while comes:
            with batches_of(reader, 4, seed=2) as epoch:
                other = next(epoch).indices.tolist(), next(epoch).indices.tolist()
                comes = _interrupt(lambda epoch=epoch: epoch.resume(state), calls)
                found = [batch.indices.tolist() for batch in epoch]
                if found != expected[2:]:
                    assert comes, calls
                    taken = sorted(index for batch in [*other, *found] for index in batch)
                    assert taken == list(range(20)), calls
            calls += 1
        assert calls > 5


# Hypothesis measures garbage collections by a Python function, where exceptions are ignored.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_handler_that_raises_costs_no_batch(bench):
    made = bench(random_samples(600))
    random = np.random.default_rng(0)
    with made.reader() as reader:
        for seed in range(5):
            assert _taken_with_alarms(batches_of(reader, 4, seed=seed), random) == list(range(600))


def _taken_with_alarms(epoch, random) -> list[int]:
    """Return all indices of an epoch, sorted, while alarms interrupt its loop at random."""
    taken: list = []
    batches = len(epoch)

    def alarm(*_: object) -> None:
        if (
            len(taken) < batches
        ):  # after the last batch, an alarm would interrupt the test and not the loop
            raise Alarmed

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        while len(taken) < batches:
            with contextlib.suppress(Alarmed):
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-3))
                for batch in epoch:
                    taken.append(batch)
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-3))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert next(epoch, None) is None
    return sorted(index for batch in taken for index in batch.indices.tolist())


def test_a_second_loop_over_an_epoch_does_not_end_in_silence(bench):
    made = bench(random_samples(20))
    with made.reader() as reader, batches_of(reader, 8) as epoch:
        start = epoch.state()
        next(epoch)
        assert len([*epoch]) == 2  # goes on
        with pytest.raises(UsageError, match=r"all batches of epoch 0 .*epoch=1\) for the next"):
            list(epoch)
        assert next(epoch, None) is None
        assert len([*epoch.resume(start)]) == 3
