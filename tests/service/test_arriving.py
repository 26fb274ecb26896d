"""An import is read through a service while it goes on."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.dataset import arriving, committed_steps
from dlfs.errors import ServiceLostError, StaleError, UsageError
from dlfs.service import protocol
from dlfs.service.control import ControlConnection
from tests.service.serving import Service
from tests.support.arriving import (
    CHUNK_BYTES,
    OPTIONS,
    PATHS,
    SAMPLES,
    WINDOW_CHUNKS,
    add,
    importing,
    leave_unfinished,
    order_of,
    take,
)
from tests.support.files import flip_bit
from tests.support.volumes import new_volume
from tests.support.waiting import wait_for

WINDOW_BYTES = WINDOW_CHUNKS * CHUNK_BYTES


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)
    monkeypatch.setattr(arriving, "POLL_S", 0.001)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return new_volume(tmp_path / "v", size_bytes=64 * MIB, chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def own(path: Path) -> Iterator[dlfs.Volume]:
    """The volume by its devices, for the import."""
    with dlfs.open(path) as opened:
        yield opened


@pytest.fixture
def service(serve: Callable[..., Service], path: Path) -> Service:
    return serve(str(path))


@pytest.fixture
def client(service: Service) -> Iterator[dlfs.Volume]:
    with dlfs.connect(service.uri) as connected:
        yield connected


def opened_by(service: Service) -> list[tuple[str, int]]:
    """Return the name and the users of each open dataset or import."""
    return [(each["dataset"], each["users"]) for each in service.snapshot()["datasets"]]


def test_every_step_is_read_as_it_comes(own: dlfs.Volume, client: dlfs.Volume) -> None:
    with client.arriving("d") as dataset, importing(own) as writer:
        epoch = dataset.batches(8, **OPTIONS)
        seen: list[bytes] = []
        for first in range(0, len(PATHS), 10):
            add(writer, SAMPLES, PATHS[first : first + 10])
            dataset.look()
            opened = dataset.opened()
            while opened.arrival is not None and opened.has(len(seen) + 8, WINDOW_BYTES):
                seen += take(dataset, epoch, 8)
        assert dataset.total is None
        assert len(seen) > len(PATHS) // 2
        state = epoch.state()
        writer.seal()
        seen += take(dataset, epoch)
        assert dataset.total == len(PATHS)
        assert seen == order_of(own)
        assert sorted(seen) == sorted(PATHS)
        rest = dataset.batches(5, **OPTIONS).resume(state)
        assert take(dataset, rest) == seen[state["position"] :]


def test_a_step_that_is_sealed_before_it_is_opened_is_read_from_the_dataset(
    own: dlfs.Volume, client: dlfs.Volume
) -> None:
    with client.arriving("d") as dataset, importing(own) as writer:
        add(writer, SAMPLES, PATHS)
        writer.end_step()
        dataset.look()
        assert dataset.total is None
        writer.seal()
        assert len(take(dataset, dataset.batches(8, **OPTIONS), 200)) == 200
        assert dataset.total == len(PATHS)


def test_samples_and_columns_are_those_of_the_volume(
    own: dlfs.Volume, client: dlfs.Volume, service: Service
) -> None:
    leave_unfinished(own)
    with client.arriving("d") as dataset, own.arriving("d") as expected:
        dataset.look()
        assert (dataset.uuid, dataset.arrived) == (expected.uuid, expected.arrived)
        numbers = list(range(0, dataset.arrived, 3))
        assert dataset.paths_of(numbers) == expected.paths_of(numbers)
        assert dataset.read(numbers).to_list() == expected.read(numbers).to_list()
        assert (dataset.column("text", numbers) == expected.column("text", numbers)).all()
        with pickle.loads(pickle.dumps(dataset)) as copy:
            assert copy.read(numbers).to_list() == expected.read(numbers).to_list()
        (found,) = service.snapshot()["datasets"]
        assert (found["dataset"], found["version"]) == ("d", 0)
        assert found["users"] > 1
    wait_for(lambda: [users for _, users in opened_by(service)] == [0], "the steps to be released")
    own.abandon("d")
    with dlfs.connect(service.uri) as again:
        assert again.unfinished() == []
        assert opened_by(service) == []


def test_an_abandoned_import_ends_the_epoch(own: dlfs.Volume, client: dlfs.Volume) -> None:
    with client.arriving("d") as dataset:
        leave_unfinished(own)
        epoch = dataset.batches(8, **OPTIONS)
        take(dataset, epoch, 16)
        own.abandon("d")
        with pytest.raises(StaleError, match="was abandoned"):
            take(dataset, epoch)
        with importing(own) as writer:  # into the chunks that became free
            add(writer, SAMPLES, PATHS)
        with pytest.raises(StaleError, match="was abandoned"):
            take(dataset, epoch)
    with client.arriving("d") as dataset:
        assert sorted(take(dataset, dataset.batches(8, **OPTIONS))) == sorted(PATHS)


def test_other_writers_move_the_chunks_meanwhile(
    own: dlfs.Volume, client: dlfs.Volume, path: Path, tmp_path: Path
) -> None:
    with importing(own) as writer, client.arriving("d") as dataset:
        add(writer, SAMPLES, PATHS[:200])
        writer.end_step()
        epoch = dataset.batches(4, **OPTIONS)
        seen = take(dataset, epoch, 20)
        with dlfs.open(path) as other:
            other.grow([str(tmp_path / "w")], size_bytes=64 * MIB)
            other.shrink([0])
        dataset.look()
        with path.open("r+b") as file:  # as if it had been given to someone else
            file.seek(MIB)
            file.write(bytes(63 * MIB))
        seen += take(dataset, epoch, 40)
        own.refresh()
        add(writer, SAMPLES, PATHS[200:])
        writer.seal()
        seen += take(dataset, epoch)
        assert seen == order_of(own)


def test_a_damaged_sample_is_named(own: dlfs.Volume, client: dlfs.Volume) -> None:
    leave_unfinished(own)
    with own.arriving("d") as dataset:
        number = next(n for n in range(100) if SAMPLES[dataset.path(n)])
        session = dataset.opened().window_of(number, WINDOW_BYTES).sessions[0]
        data = dataset.read([number]).to_list()[0]
        assert session.directory
    raw = Path(own.uri).read_bytes()
    flip_bit(own.uri, raw.index(data))
    with client.arriving("d") as dataset, pytest.raises(dlfs.FormatError, match="CRC32C"):
        dataset.read([number])


def test_the_next_service_goes_on(
    own: dlfs.Volume, service: Service, serve: Callable[..., Service], path: Path
) -> None:
    with dlfs.connect(service.uri) as client, client.arriving("d") as dataset:
        with importing(own) as writer:
            add(writer, SAMPLES, PATHS[:200])
            writer.end_step()
            epoch = dataset.batches(4, **OPTIONS)
            seen = take(dataset, epoch, 40)
            service.kill()
            with pytest.raises(ServiceLostError):
                take(dataset, epoch, 4)
            serve(str(path))
            seen += take(dataset, epoch, 20)
            add(writer, SAMPLES, PATHS[200:])
        seen += take(dataset, epoch)
        assert seen == order_of(own)


# ---- limits --------------------------------------------------------------------------------------


def open_steps(
    uri: str, volume: UUID, dataset: UUID, numbers: list[int]
) -> list[ControlConnection]:
    """Open a step over a connection for each number."""
    connections = []
    for number in numbers:
        connections.append(ControlConnection(uri.removeprefix("unix:")))
        request = protocol.OpenStep(volume, dataset, number)
        connections[-1].request(request, protocol.DatasetState, 2)[1].close()
    return connections


def test_an_import_ends_and_its_dataset_is_removed_while_clients_hold_its_steps(
    own: dlfs.Volume, client: dlfs.Volume, service: Service
) -> None:
    with importing(own) as writer:
        add(writer, SAMPLES, PATHS[:200])
        writer.end_step()
        (unfinished,) = own_unfinished(client)
        kept = open_steps(service.uri, client.uuid, unfinished, [0, 1, 0])
        assert opened_by(service) == [("d", 3)]
        add(writer, SAMPLES, PATHS[200:])
    own.refresh()
    own.remove("d")
    with client.arriving("d") as dataset:
        assert dataset.uuid is None
    assert opened_by(service) == [("d", 3)]
    for connection in kept:
        connection.close()
    wait_for(lambda: opened_by(service) == [], "the steps to be closed")


def own_unfinished(volume: dlfs.Volume) -> list[UUID]:
    volume.refresh()
    return [info.uuid for info in volume.unfinished()]


def test_what_an_import_does_not_have_is_refused(
    own: dlfs.Volume, client: dlfs.Volume, service: Service
) -> None:
    leave_unfinished(own)
    (unfinished,) = own_unfinished(client)
    with closing(ControlConnection(str(service.socket))) as control:

        def ask(request: protocol.Message, kind: type[protocol.Message], count: int) -> None:
            control.request(request, kind, count)[1].close()

        headers = protocol.GetSteps(client.uuid, unfinished, 0)
        ask(headers, protocol.Steps, 1)
        ask(protocol.GetSteps(client.uuid, unfinished, 1 << 60), protocol.Steps, 1)
        with pytest.raises(StaleError, match="it has ended"):
            ask(protocol.GetSteps(client.uuid, UUID(int=1), 0), protocol.Steps, 1)
        with pytest.raises(StaleError, match="it has ended"):
            ask(protocol.OpenStep(client.uuid, UUID(int=1), 0), protocol.DatasetState, 2)
        with pytest.raises(dlfs.NotFoundError, match="open step 99 of the import of 'd'"):
            ask(protocol.OpenStep(client.uuid, unfinished, 99), protocol.DatasetState, 2)
        ask(protocol.OpenStep(client.uuid, unfinished, 0), protocol.DatasetState, 2)
        with pytest.raises(UsageError, match="has it open"):
            ask(protocol.OpenStep(client.uuid, unfinished, 1), protocol.DatasetState, 2)


def test_a_killed_client_leaves_nothing(own: dlfs.Volume, service: Service) -> None:
    leave_unfinished(own)
    told, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with dlfs.connect(service.uri) as client, client.arriving("d") as dataset:
                batches = [next(dataset.batches(8, **OPTIONS)), dataset.read(range(40))]
                os.write(says, b"x" * len(batches))
                os.read(told, 1)  # what it has read is pinned until it is killed
                os.read(os.pipe()[0], 1)
        finally:
            os._exit(1)
    try:
        wait_for(lambda: dict(opened_by(service)).get("d", 0) > 0, "the client to read")
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(told)
        os.close(says)
    wait_for(lambda: opened_by(service) == [("d", 0)], "the service to forget it")
    assert service.clients() == []
