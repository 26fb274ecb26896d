"""Training through a service while an import writes to its volume."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import DlfsError, ServiceLostError, UsageError
from tests.service.serving import Service
from tests.support.volumes import new_volume

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from dlfs.adapters.torch import ImportingLoader, Loader  # noqa: E402
from tests.support.torch_processes import run_ranks  # noqa: E402
from tests.unit.adapters.torch.test_importing import (  # noqa: E402
    CHUNK_BYTES,
    COUNT,
    IMPORT,
    OPTIONS,
    archive,
    logged,
    numbers,
    process_of,
    take,
)

__all__ = ["archive"]

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return new_volume(tmp_path / "v", size_bytes=64 * MIB, chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def service(serve: Callable[..., Service], path: Path) -> Service:
    return serve(str(path))


@pytest.fixture
def make(archive: Path, path: Path, service: Service) -> Iterator[Callable[..., ImportingLoader]]:
    """Makes loaders of the volume of the service, which are closed at the end."""
    made: list[ImportingLoader] = []
    with dlfs.connect(service.uri) as volume:

        def make_loader(**options: Any) -> ImportingLoader:
            options = {"import_options": IMPORT, "labels": "number", **OPTIONS, **options}
            loader = ImportingLoader(archive, volume, "d", 8, **{"import_to": path, **options})
            made.append(loader)
            return loader

        yield make_loader
        for loader in made:
            loader.close()


def test_it_goes_on_when_the_import_and_the_service_were_killed(
    make: Any, service: Service, serve: Callable[..., Service], path: Path
) -> None:
    loader = make()
    seen: list[int] = []

    def go_on(count: int | None = None) -> None:
        for at, batch in enumerate(loader, 1):
            seen.extend(numbers(batch))
            if at == count:
                break

    go_on(3)
    process_of(loader).kill()
    process_of(loader).wait()
    with pytest.raises(DlfsError, match="ended by signal 9; the next run goes on with its steps"):
        go_on()
    service.kill()
    serve(str(path))
    for _ in range(2):  # what was under way is lost once; the next call connects again
        try:
            go_on()
            break
        except ServiceLostError:
            assert loader.position == len(seen)
    assert sorted(seen) == list(range(COUNT))
    assert loader.epoch == 1
    second = take(loader)
    with dlfs.open(path) as volume, volume["d"] as dataset:
        ordinary = Loader(dataset, 8, seed=3)
        ordinary.set_epoch(1)
        assert take(ordinary) == second


def test_workers_read_through_the_service(make: Any) -> None:
    assert sorted(take(make(num_workers=2))) == list(range(COUNT))


def test_the_import_needs_the_volume_itself(make: Any, path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"expected import_to, .*; its own is {path}"):
        make(import_to=None)
    other = new_volume(tmp_path / "other", size_bytes=64 * MIB, chunk_bytes=CHUNK_BYTES)
    with pytest.raises(UsageError, match="expected import_to to be volume"):
        take(make(import_to=other))
    with pytest.raises(dlfs.NotFoundError):
        take(make(import_to=[tmp_path / "none"]))


# ---- ranks ---------------------------------------------------------------------------------------


def train(
    join: Any, archive: Path, path: Path, uri: str, log: Path, stop: int | None, state: Any
) -> list[int]:
    """Train one epoch through a service, with a barrier at each step; log what this rank gets.

    Args:
        join: joins the ranks.
        archive: source.
        path: volume.
        uri: the service.
        log: directory of the logs of all ranks, and of the states of rank 0.
        stop: step behind which all ranks are killed.
        state: state to continue at.

    Returns:
        The number of samples in each step.
    """
    rank = join()
    steps = []
    with dlfs.connect(uri) as volume:
        target = path if rank == 0 else "not on this host"
        loader = ImportingLoader(
            archive, volume, "d", 6, import_options=IMPORT, import_to=target, **OPTIONS
        )
        if state is not None:
            loader.load_state_dict(state)
        for step, batch in enumerate(loader, 1):
            found = numbers(batch)
            steps.append(len(found))
            with (log / f"{rank}.log").open("a") as file:
                file.write("".join(f"{number}\n" for number in found))
            dist.barrier()
            if rank == 0:
                torch.save(loader.state_dict(), log / "state.pt")
            dist.barrier()
            if step == stop:
                os.kill(os.getpid(), signal.SIGKILL)
        loader.close()
    return steps


def test_four_ranks_are_killed_and_two_go_on(
    archive: Path, path: Path, service: Service, tmp_path: Path
) -> None:
    stop = random.randrange(1, COUNT // 24)
    for name in ("first", "rest"):
        (tmp_path / name).mkdir()
    killed = run_ranks(4, train, archive, path, service.uri, tmp_path / "first", stop, None)
    assert killed == [-signal.SIGKILL] * 4
    before = logged(tmp_path / "first")
    assert len(before) == stop * 24
    state = torch.load(tmp_path / "first" / "state.pt")
    rest = run_ranks(2, train, archive, path, service.uri, tmp_path / "rest", None, state)
    assert rest[0] == rest[1], stop
    found = before + logged(tmp_path / "rest")
    # The last round of two ranks is filled with the first sample of the epoch.
    assert sorted(set(found)) == list(range(COUNT)), stop
    assert len(found) == COUNT + (COUNT - stop * 24) % 2, stop


def test_four_ranks_take_each_sample_once(
    archive: Path, path: Path, service: Service, tmp_path: Path
) -> None:
    log = tmp_path / "whole"
    log.mkdir()
    found = run_ranks(4, train, archive, path, service.uri, log, None, None)
    assert found == [found[0]] * 4
    got = logged(log)
    assert sorted(set(got)) == list(range(COUNT))
    assert len(got) == -(-COUNT // 4) * 4


def fail(join: Any, archive: Path, other: Path, uri: str) -> str:
    join()
    with dlfs.connect(uri) as volume:
        loader = ImportingLoader(archive, volume, "d", 6, import_to=other, **OPTIONS)
        try:
            take(loader)
        except DlfsError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()  # rank 0 has told the others
            loader.close()
    return ""


def test_every_rank_learns_that_the_import_has_another_volume(
    archive: Path, service: Service, tmp_path: Path
) -> None:
    other = new_volume(tmp_path / "other", size_bytes=64 * MIB, chunk_bytes=CHUNK_BYTES)
    found = run_ranks(2, fail, archive, other, service.uri)
    assert found == [found[0]] * 2
    assert found[0].startswith("UsageError: import 'd' while training: expected import_to to be")
