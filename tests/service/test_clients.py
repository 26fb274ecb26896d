"""Several clients of one service: processes, forks, threads; and one that takes all it can."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import dlfs
from dlfs.errors import LimitError, ServiceLostError
from dlfs.service import session
from tests.service.serving import Hurry, Service, make_volume
from tests.support.forked import run_forked
from tests.support.scripts import hear, running, tell
from tests.support.stopping import stop_process
from tests.support.waiting import wait_for

READER = """
import sys
import dlfs

uri, rank = sys.argv[1], int(sys.argv[2])
dataset = dlfs.connect(uri)["d"]
print("open", flush=True)
sys.stdin.readline()
total = 0
for epoch in range(2):
    for batch in dataset.batches(16, seed=5, epoch=epoch, rank=rank, world_size=4):
        with batch:
            for index, view in zip(batch.indices.tolist(), batch):
                total += hash((index, bytes(view))) & 0xFFFF
print(total, flush=True)
sys.stdin.readline()
"""

GREEDY = """
import sys
import dlfs

dataset = dlfs.connect(sys.argv[1])["d"]
unreleased = []
try:
    while True:
        unreleased.append(dataset.read(range(len(dataset))))
except dlfs.LimitError:
    print("full", flush=True)
sys.stdin.readline()
wanted = unreleased[0].to_list()
print(all(batch.to_list() == wanted for batch in unreleased), flush=True)
"""

ENVIRONMENT = {**os.environ, "PYTHONHASHSEED": "0"}


def expected_total(volume: str, rank: int) -> str:
    """Return what ``READER`` prints in a process with the devices."""
    script = READER.replace("dlfs.connect(uri)", "dlfs.open(uri)")
    with running(script, volume, str(rank), env=ENVIRONMENT) as process:
        assert hear(process) == "open"
        tell(process)
        return hear(process)


def test_indices_out_of_range_are_named_and_cost_no_channel(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    with dlfs.connect(serve(volume).uri) as connected:
        dataset = connected["d"]
        with pytest.raises(dlfs.UsageError, match=rf"got {len(samples)} at position 1"):
            dataset.read([0, len(samples)])
        assert dataset.read([0]).to_list() == [samples[min(samples)]]


def test_processes_share_one_directory_and_one_cache(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    service = serve(volume)
    with ExitStack() as stack:
        readers = [
            stack.enter_context(running(READER, service.uri, str(rank), env=ENVIRONMENT))
            for rank in range(4)
        ]
        assert [hear(reader) for reader in readers] == ["open"] * 4
        for reader in readers:
            tell(reader)
        totals = [hear(reader) for reader in readers]
        assert totals == [expected_total(volume, rank) for rank in range(4)]
        snapshot = service.snapshot()
        (dataset,) = snapshot["datasets"]
        assert dataset["users"] == 4
        assert dataset["reader"]["samples"] == 2 * len(samples)
        stored = sum(map(len, samples.values()))
        assert dataset["reader"]["read_bytes"] < 3 * stored  # not by each of the four
        for reader in readers:
            tell(reader)
    wait_for(lambda: service.clients() == [], "clients to be forgotten")
    service.stop()


def read_without_end(dataset: dlfs.Dataset) -> None:
    """Read the first sample again and again."""
    while True:
        dataset.read([0]).release()


def test_cached_samples_are_read_without_a_request_to_the_service(
    serve: Callable[..., Service],
    samples: dict[bytes, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Hurry(monkeypatch)
    small = {path: data for path, data in samples.items() if len(data) < 8192}
    wanted = list(small.values())
    service = serve(make_volume(tmp_path / "small.img", small))
    with dlfs.connect(service.uri)["d"] as dataset:
        everything = range(len(dataset))
        with dataset.read(everything) as batch:
            assert batch.to_list() == wanted
        stop_process(service.pid)
        try:
            unreleased = dataset.read(everything)
            assert unreleased.to_list() == wanted
            assert [dataset[index] for index in everything] == wanted
        finally:
            os.kill(service.pid, signal.SIGCONT)
        wait_for(
            lambda: [client["batches_out"] for client in service.clients()] == [0],
            "the first batch to be released, and the volume's connection to be forgotten",
        )
        (entry,) = service.clients()
        assert (entry["samples"], entry["batches"]) == (3 * len(wanted), 2)
        assert service.snapshot()["datasets"][0]["reader"]["samples"] == 3 * len(wanted)
        service.process.kill()
        service.process.wait()
        with pytest.raises(ServiceLostError):
            read_without_end(dataset)
        assert unreleased.to_list() == wanted


def test_a_greedy_client_is_limited_and_stops_no_other_client(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    service = serve(volume, options=("--cache", "64KiB"))
    with running(GREEDY, service.uri) as greedy:
        assert hear(greedy) == "full"
        wait_for(lambda: len(service.clients()) == 1, "its volume's connection to be forgotten")
        (entry,) = service.clients()
        assert entry["refusals"] >= 1
        arena = service.snapshot()["memory"]["memory_bytes"]
        assert entry["pinned_bytes"] <= arena * session.PINNED_SHARE
        with dlfs.connect(service.uri)["d"] as dataset:
            wanted = list(samples.values())
            for batch in dataset.batches(64, seed=1):
                with batch:
                    assert batch.to_list() == [wanted[i] for i in batch.indices.tolist()]
        tell(greedy)
        assert hear(greedy) == "True"
    wait_for(lambda: service.clients() == [], "the greedy client to be forgotten")


def test_a_process_has_so_many_channels(serve: Callable[..., Service], volume: str) -> None:
    service = serve(volume)
    with dlfs.connect(service.uri)["d"] as dataset:
        epochs = [dataset.batches(8, seed=seed) for seed in range(session.CHANNELS_MAX + 1)]
        for epoch in epochs[:-1]:
            next(epoch).release()
        with pytest.raises(LimitError, match=f"at most {session.CHANNELS_MAX} in one process"):
            next(epochs[-1])
        epochs[0].close()
        next(epochs[-1]).release()
        for epoch in epochs:
            epoch.close()


def test_threads(serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]) -> None:
    wanted = list(samples.values())
    dataset = dlfs.connect(serve(volume).uri)["d"]
    problems: list[object] = []

    def work(number: int) -> None:
        try:
            for index in range(number, len(wanted), 8):
                with dataset.read([index, number]) as batch:
                    assert batch.to_list() == [wanted[index], wanted[number]]
                assert dataset[index] == wanted[index]
        except (dlfs.DlfsError, AssertionError) as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def _read_in_child(
    connected: dlfs.Volume, dataset: dlfs.Dataset, epoch: dlfs.Epoch, wanted: list[bytes]
) -> None:
    assert connected.label == "images"
    for batch in epoch:
        assert batch.to_list() == [wanted[index] for index in batch.indices.tolist()]
    assert dataset.get("class1/00001") == wanted[dataset.index("class1/00001")]


def test_forked_children_connect_by_themselves(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    service = serve(volume)
    wanted = list(samples.values())
    connected = dlfs.connect(service.uri)
    dataset = connected["d"]
    epoch = dataset.batches(64, seed=2)
    first = next(epoch)
    for _ in range(2):
        assert run_forked(_read_in_child, connected, dataset, epoch, wanted) == 0
    assert first.to_list() == [wanted[index] for index in first.indices.tolist()]
    assert len(list(epoch)) == -(-len(wanted) // 64) - 1
    wait_for(
        lambda: [entry["pid"] for entry in service.clients()] == [os.getpid()] * 2,
        "the children to be forgotten",
    )


def _first_bytes(raw: bytes) -> bytes:
    dataset: dlfs.Dataset = pickle.loads(raw)
    return dataset.read([1]).to_list()[0]


def test_spawned_children_take_a_pickle(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    dataset = dlfs.connect(serve(volume).uri)["d"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_first_bytes, (pickle.dumps(dataset),)) == list(samples.values())[1]


def test_a_restarted_service_is_found_again(
    serve: Callable[..., Service],
    volume: str,
    samples: dict[bytes, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Hurry(monkeypatch)
    service = serve(volume)
    connected = dlfs.connect(service.uri)
    dataset = connected["d"]
    directory = dataset.directory
    with dataset.batches(50, seed=9) as whole:
        order = [index for batch in whole for index in batch.indices.tolist()]
    epoch = dataset.batches(50, seed=9)
    batch = next(epoch)
    taken = batch.indices.tolist()
    service.kill()
    with pytest.raises(ServiceLostError, match=service.uri):
        dataset.read([0])
    with pytest.raises(ServiceLostError, match=f"connect to {service.uri}: Connection refused"):
        dataset.read([0])
    with pytest.raises(ServiceLostError, match=service.uri):
        next(epoch)
    with pytest.raises(ServiceLostError):
        connected.refresh()
    wanted = list(samples.values())
    assert batch.to_list() == [wanted[index] for index in taken]
    serve(volume)
    assert dataset.read([5]).to_list() == [wanted[5]]
    assert dataset.directory is directory
    for later in epoch:
        taken += later.indices.tolist()
        assert later.to_list() == [wanted[index] for index in later.indices.tolist()]
    assert taken == order
    connected.refresh()
    assert connected.label == "images"


def test_names_are_there_after_a_restart(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    service = serve(volume)
    dataset = dlfs.connect(service.uri)["d"]
    assert len(dataset) == 607
    service.kill()
    serve(volume)
    assert dataset.path(0) == b"class0/00000"
    with pytest.raises(ServiceLostError):  # the call that meets the loss
        dataset.get("class0/00005")
    assert dataset.get("class0/00005") == samples[b"class0/00005"]
