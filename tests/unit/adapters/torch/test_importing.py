"""Training while an import runs: each sample once in the first epoch, on any number of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import random
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import DlfsError, FormatError, NotFoundError, StaleError, UsageError
from dlfs.ingest.workers.invitation import Invitation
from tests.support.files import write_files
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem
from tests.support.volumes import new_volume
from tests.support.waiting import wait_for

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from dlfs.adapters.torch import ImportingLoader, Loader, import_process  # noqa: E402
from tests.support.torch_processes import run_ranks  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

COUNT = 403
CHUNK_BYTES = 64 * KIB
OPTIONS: dict[str, Any] = {"window_bytes": 2 * CHUNK_BYTES, "seed": 3}
IMPORT = ["--seed", "5", "--attribute", "number:int=([0-9]+)[.]bin"]


def sample(number: int) -> bytes:
    return b"%08d" % number + bytes(random.Random(number).randrange(2000, 6000))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "samples.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=0) as made:
        for number in range(COUNT):
            data = sample(number)
            info = tarfile.TarInfo(f"{number:04}.bin")
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {f"{number:04}.bin": sample(number) for number in range(COUNT)}
    return write_files(tmp_path_factory.mktemp("source"), files)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return new_volume(tmp_path / "v", size_bytes=64 * MIB, chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def make(archive: Path, path: Path) -> Iterator[Callable[..., ImportingLoader]]:
    """Makes loaders of a volume, which are closed at the end."""
    made: list[ImportingLoader] = []
    with dlfs.open(path) as volume:

        def make_loader(batch_size: int = 8, **options: Any) -> ImportingLoader:
            options = {"import_options": IMPORT, "labels": "number", **OPTIONS, **options}
            source = options.pop("source", archive)
            loader = ImportingLoader(source, volume, "d", batch_size, **options)
            made.append(loader)
            return loader

        yield make_loader
        for loader in made:
            loader.close()


def numbers(batch: Any) -> list[int]:
    """Return the numbers of the samples of a batch, which are checked."""
    found = []
    for data in batch.samples:
        raw = data.numpy().tobytes()
        found.append(int(raw[:8]))
        assert raw == sample(found[-1])
    if batch.labels is not None:
        assert batch.labels.tolist() == found
    return found


def take(batches: Any, count: int | None = None) -> list[int]:
    found: list[int] = []
    for at, batch in enumerate(batches, 1):
        found += numbers(batch)
        if at == count:
            break
    return found


def process_of(loader: ImportingLoader) -> Any:
    """Return the process of the import, when it has started."""
    assert loader._running is not None
    while loader._running._process is None:
        time.sleep(0.01)
    return loader._running._process


def test_later_epochs_are_those_of_the_sealed_dataset(make: Any, path: Path) -> None:
    loader = make()
    assert (loader.epoch, loader.position) == (0, 0)
    first = take(loader)
    assert sorted(first) == list(range(COUNT))
    assert first != list(range(COUNT))
    assert (loader.epoch, loader.position, len(loader)) == (1, 0, -(-COUNT // 8))
    second = take(loader)
    with dlfs.open(path) as volume, volume["d"] as dataset:
        ordinary = Loader(dataset, 8, seed=3)
        ordinary.set_epoch(1)
        assert take(ordinary) == second
        # Its states from here on are those of the dataset.
        ordinary.load_state_dict(loader.state_dict())
        assert (ordinary.epoch, ordinary.position) == (2, 0)
    loader.set_epoch(0)
    assert take(loader) == first
    # An import that has ended gives the same order, by whatever batches and workers.
    for size, workers in ((8, 2), (13, 0)):
        again = make(size, num_workers=workers)
        assert len(again) == -(-COUNT // size)
        assert take(again) == first


def test_it_goes_on_from_a_state_in_mid_epoch(make: Any) -> None:
    loader = make()
    begin = loader.state_dict()
    before = take(loader, 7)
    state = loader.state_dict()
    assert (loader.epoch, loader.position) == (0, 56)
    loader.close()  # also the import
    resumed = make(5)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.position) == (0, 56)
    assert resumed.state_dict() == state
    after = take(resumed)
    assert sorted(before + after) == list(range(COUNT))
    resumed.load_state_dict(begin)
    assert take(resumed, 11) == (before + after)[:55]
    last = make()
    last.load_state_dict({**state, "position": COUNT})
    assert take(last, 1)
    assert last.epoch == 1


def test_the_loop_waits_for_a_slow_import(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dlfs.dataset import arriving

    monkeypatch.setattr(arriving, "NOTICE_S", 0.05)
    caplog.set_level("WARNING", "dlfs")
    loader = make()
    batches = iter(loader)
    seen: list[int] = []
    is_stopped = False
    for batch in batches:
        seen += numbers(batch)
        process = process_of(loader)
        if not is_stopped and process.poll() is None:
            is_stopped = True
            os.kill(process.pid, signal.SIGSTOP)
            loader._arriving.look()
            if loader._arriving.total is None:
                with pytest.raises(TypeError, match="unknown until the import has ended"):
                    len(loader)
            os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 1; kill -CONT {process.pid}"], {})
    assert is_stopped
    assert "the import of 'd' is waited for: " in caplog.text
    assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loop_gets_the_error_of_the_import(
    make: Any, tmp_path: Path, archive: Path, workers: int
) -> None:
    torn = tmp_path / "torn.tar.gz"
    torn.write_bytes(archive.read_bytes()[:-700_000])
    loader = make(source=torn, num_workers=workers)
    with pytest.raises(FormatError, match=r"import 'd' while training: .*torn\.tar"):
        take(loader)
    if workers:
        return
    # The next iteration tries again, from where this one has come to.
    with pytest.raises(FormatError, match=r"torn\.tar"):
        take(loader)
    with pytest.raises(NotFoundError, match="there is no such file"):
        take(make(source=tmp_path / "none.tar"))


def test_an_import_that_was_killed_alone_is_resumed(make: Any) -> None:
    loader = make()
    seen = []
    batches = iter(loader)
    seen += numbers(next(batches))
    process_of(loader).kill()
    process_of(loader).wait()

    def go_on() -> None:
        for batch in batches:
            seen.extend(numbers(batch))

    with pytest.raises(DlfsError, match="ended by signal 9; the next run goes on with its steps"):
        go_on()
    assert loader.position == len(seen)
    seen += take(loader)
    assert sorted(seen) == list(range(COUNT))


def test_an_abandoned_import_ends_the_epoch(make: Any, path: Path) -> None:
    loader = make()
    batches = iter(loader)
    next(batches)
    process = process_of(loader)
    os.kill(process.pid, signal.SIGSTOP)
    with dlfs.open(path) as volume:
        if not volume.unfinished():
            pytest.skip("the import was done before it could be stopped")
        process.kill()
        process.wait()
        volume.abandon("d")
    with pytest.raises((StaleError, DlfsError)):
        take(batches)


def test_what_does_not_fit_is_refused(make: Any, archive: Path, path: Path) -> None:
    for options in (
        {"where": [1]},
        {"order": [1]},
        {"on_error": "replace"},
        {"import_options": ["--append"]},
        {"import_options": "--seed 1"},
        {"source": "-"},
        {"window_bytes": 0},
        {"uneven": "some"},
        {"import_workers": -1},
        {"import_workers": 1, "import_options": ["--workers", "2"]},
    ):
        with pytest.raises(UsageError):
            make(**options)
    with pytest.raises(TypeError, match="did you mean 'shuffle'"):
        make(shufle=None)
    with pytest.raises(UsageError, match=r"torch\.distributed to be initialised"):
        take(make(rank=0, world_size=2))
    with pytest.raises(UsageError, match="import it without workers"):
        take(make(import_workers=1))
    loader = make(import_options=[*IMPORT, "--attribute", "text=(.)"], labels="text")
    with pytest.raises(UsageError, match="expected numbers, got strings"):
        take(loader)
    text = torch.utils.data.DataLoader(make(), batch_size=None, num_workers=1)
    with pytest.raises(UsageError, match="expected the training process"):
        next(iter(text))


def test_another_state_is_refused(make: Any, path: Path) -> None:
    loader = make()
    take(loader, 3)
    state = loader.state_dict()
    other = {**state, "dataset": "import:" + "0" * 32}
    with pytest.raises(UsageError, match="of another import"):
        loader.load_state_dict(other)
    take(loader)
    with dlfs.open(path) as volume, volume["d"] as dataset:
        with pytest.raises(UsageError, match="another version or dataset"):
            Loader(dataset, 8).load_state_dict(state)
        with volume.writer("x") as writer:
            writer.add("a", b"a")
        volume.refresh()
        with volume["x"] as another, pytest.raises(UsageError, match="another dataset"):
            loader.load_state_dict(Loader(another, 8).state_dict())


# ---- ranks ---------------------------------------------------------------------------------------


def train(
    join: Any, source: Path, path: Path, log: Path, stop: int | None, state: Any, workers: int
) -> dict[str, Any]:
    """Train one epoch, with a barrier at each step; log what this rank has got.

    Args:
        join: joins the ranks.
        source: source.
        path: volume.
        log: directory of the logs of all ranks, and of the states of rank 0.
        stop: step behind which all ranks are killed.
        state: state to continue at.
        workers: workers of the import in each rank.
    """
    rank = join()
    steps = []
    options = {"import_options": IMPORT, "import_workers": workers, **OPTIONS}
    with dlfs.open(path) as volume:
        loader = ImportingLoader(source, volume, "d", 6, **options)
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
                note_workers(log)
                os.kill(os.getpid(), signal.SIGKILL)
        epoch = loader.epoch
        second = take(loader)
        loader.close()
    return {"steps": steps, "epoch": epoch, "second": second}


def logged(log: Path) -> list[int]:
    return [int(line) for one in log.glob("*.log") for line in one.read_text().split()]


@pytest.mark.parametrize("workers", [0, 1])
def test_four_ranks_are_killed_and_two_go_on(
    archive: Path, folder: Path, path: Path, tmp_path: Path, workers: int
) -> None:
    source = folder if workers else archive
    stop = random.randrange(1, 12)
    for name in ("first", "rest"):
        (tmp_path / name).mkdir()
    killed = run_ranks(4, train, source, path, tmp_path / "first", stop, None, workers)
    assert killed == [-signal.SIGKILL] * 4
    wait_for_end_of_workers(tmp_path / "first")
    wait_for(lambda: not find_processes(os.fsencode(path)), "the end of the import")
    before = logged(tmp_path / "first")
    assert len(before) == stop * 24
    state = torch.load(tmp_path / "first" / "state.pt")
    assert state["position"] == stop * 24
    rest = run_ranks(2, train, source, path, tmp_path / "rest", None, state, workers)
    assert all(isinstance(one, dict) for one in rest), (stop, rest)
    assert rest[0]["steps"] == rest[1]["steps"], stop
    assert [one["epoch"] for one in rest] == [1, 1]
    found = before + logged(tmp_path / "rest")
    # The last round of two ranks is filled with the first sample of the epoch.
    assert sorted(set(found)) == list(range(COUNT)), stop
    assert len(found) == COUNT + (COUNT - stop * 24) % 2, stop
    with dlfs.open(path) as volume, volume["d"] as dataset:
        for rank in range(2):
            ordinary = Loader(dataset, 6, seed=3, rank=rank, world_size=2, uneven="pad")
            ordinary.set_epoch(1)
            assert rest[rank]["second"] == take(ordinary)


def fail(join: Any, source: Path, path: Path) -> str:
    join()
    with dlfs.open(path) as volume:
        loader = ImportingLoader(source, volume, "d", 6, **OPTIONS)
        try:
            take(loader)
        except DlfsError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()  # rank 0 has told the others
            loader.close()
    return ""


def test_every_rank_gets_the_error_of_the_import(archive: Path, path: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.tar.gz"
    torn.write_bytes(archive.read_bytes()[:-700_000])
    found = run_ranks(3, fail, torn, path)
    assert found == [found[0]] * 3
    assert "FormatError: import 'd' while training" in found[0]


def leave(join: Any, archive: Path, path: Path) -> str:
    rank = join()
    with dlfs.open(path) as volume:
        loader = ImportingLoader(archive, volume, "d", 6, **OPTIONS)
        loader._begin_import()
        if rank == 0:
            os.kill(process_of(loader).pid, signal.SIGSTOP)
            loader.close()
        try:
            take(loader)
        except DlfsError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
            loader.close()
    return ""


def test_the_others_learn_that_rank_0_has_closed_its_loader(archive: Path, path: Path) -> None:
    found = run_ranks(2, leave, archive, path)
    assert found[0].startswith("ClosedError")
    assert found[1] == "DlfsError: import 'd' while training: rank 0 has ended it"


# ---- workers -------------------------------------------------------------------------------------


def find_processes(word: bytes) -> dict[int, int]:
    """Return the processes that have a word in their command line, with their parents."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (each / "cmdline").read_bytes():
                parent = (each / "stat").read_text().rpartition(")")[2].split()[1]
                found[int(each.name)] = int(parent)
    return found


def find_workers() -> list[int]:
    """Return the workers of an import that this process has as children."""
    found = find_processes(b"import-worker")
    return [pid for pid, parent in found.items() if parent == os.getpid()]


def note_workers(log: Path) -> None:
    """Note the workers of this rank in a file."""
    made = log / f"{os.getpid()}.new"
    made.write_text(" ".join(map(str, find_workers())))
    made.rename(made.with_suffix(".workers"))


def wait_for_end_of_workers(log: Path) -> None:
    noted = {int(pid) for file in log.glob("*.workers") for pid in file.read_text().split()}
    wait_for(lambda: not noted & {*find_processes(b"import-worker")}, "the end of the workers")


def digests(path: Path | str) -> list[str]:
    with dlfs.open(path) as volume:
        (info,) = volume.versions("d")
        return [info.content_digest, info.packing_digest]


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], list[str]]:
    """The order of the first epoch, and the digests of the dataset, without workers."""
    path = new_volume(
        tmp_path_factory.mktemp("plain") / "v", size_bytes=64 * MIB, chunk_bytes=CHUNK_BYTES
    )
    with dlfs.open(path) as volume:
        loader = ImportingLoader(folder, volume, "d", 6, import_options=IMPORT, **OPTIONS)
        order = take(loader)
        loader.close()
    return order, digests(path)


@pytest.mark.parametrize(
    "options", [{"import_workers": 2}, {"import_options": [*IMPORT, "--workers", "2"]}]
)
def test_one_rank_imports_by_workers(
    make: Any, folder: Path, path: Path, plain: Any, options: dict[str, Any]
) -> None:
    assert (take(make(source=folder, **options)), digests(path)) == plain


def test_four_ranks_import_and_take_each_sample_once(
    folder: Path, path: Path, tmp_path: Path, plain: Any
) -> None:
    found = run_ranks(4, train, folder, path, tmp_path, None, None, 1)
    assert [one["steps"] for one in found] == [found[0]["steps"]] * 4
    order, whole = plain
    padded = order + order[: -COUNT % 4]
    for rank in range(4):
        got = (tmp_path / f"{rank}.log").read_text().split()
        assert list(map(int, got)) == padded[rank::4]
    assert digests(path) == whole


def help_import(join: Any, folder: Path, uri: str, log: Path, dying: int) -> list[int] | str:
    """Have all ranks but rank 0 import; one is killed before the import has given out its parts.

    If the volume is one of a storage node, the ranks join from other hosts, as it seems.

    Args:
        join: joins the ranks.
        folder: source.
        uri: volume.
        log: directory in which ranks note their workers.
        dying: rank that is killed; -1 for none.
    """
    rank, start = join(), import_process.ImportWorkers

    def start_elsewhere(name: str, count: int, text: str) -> Any:
        moved = dataclasses.replace(Invitation.parse(text), boot_id=str(uuid4()))
        return start(name, count, moved.text)

    options = {"import_options": [*IMPORT], "import_workers": 1, **OPTIONS}
    if uri.startswith("nvme"):
        import_process.ImportWorkers = start_elsewhere
        options["import_options"] += ["--listen", "127.0.0.1"]
    with dlfs.open(uri) as volume:
        loader = ImportingLoader(folder, volume, "d", 6, **options)
        at = loader._command.index("--workers") + 1
        loader._command[at] = "0"
        loader._begin_import()
        if rank == 0:
            os.kill(process_of(loader).pid, signal.SIGSTOP)
        else:
            wait_for(find_workers, "the worker")
            note_workers(log)
        others = dist.get_world_size() - 1
        wait_for(lambda: len([*log.glob("*.workers")]) == others, "all workers")
        if rank == dying:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            os.kill(process_of(loader).pid, signal.SIGCONT)
        elif dying == 0:
            import_process.SILENCE_S = 1.0
        try:
            return take(loader)
        except DlfsError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            loader.close()


def test_the_others_import_without_a_rank_that_was_killed(
    folder: Path, path: Path, tmp_path: Path, plain: Any
) -> None:
    found = run_ranks(3, help_import, folder, str(path), tmp_path, 2)
    wait_for_end_of_workers(tmp_path)
    order, whole = plain
    padded = order + order[: -COUNT % 3]
    assert found == [padded[0::3], padded[1::3], -signal.SIGKILL]
    assert digests(path) == whole


def test_ranks_of_other_hosts_import(folder: Path, tmp_path: Path, plain: Any) -> None:
    disk = tmp_path / "disk"
    disk.touch()
    os.truncate(disk, 64 * MIB)
    nqn = "nqn.2024-01.org.example:disk"
    with ScriptedTarget([Subsystem(nqn, [Namespace(64 * MIB, path=disk, identity=uuid4())])]) as it:
        uri = f"nvme-tcp://127.0.0.1:{it.port}/{nqn}?nsid=1"
        dlfs.format_volume(uri, chunk_bytes=CHUNK_BYTES)
        found = run_ranks(2, help_import, folder, uri, tmp_path, -1)
        order, whole = plain
        padded = order + order[: -COUNT % 2]
        assert found == [padded[0::2], padded[1::2]]
        assert digests(uri) == whole


def test_workers_end_if_rank_0_is_killed(folder: Path, path: Path, tmp_path: Path) -> None:
    found = run_ranks(2, help_import, folder, str(path), tmp_path, 0)
    wait_for_end_of_workers(tmp_path)
    assert found[0] == -signal.SIGKILL
    assert found[1].startswith("DeviceLostError: wait for the import of 'd'")


# ---- checkpoints ---------------------------------------------------------------------------------


def test_checkpoints_are_saved_to_the_volume_meanwhile(make: Any, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from dlfs.adapters.torch.checkpoint import StorageReader, StorageWriter

    loader, writer = make(), StorageWriter(str(path), "run")
    seen: list[int] = []
    saved = 0
    for step, batch in enumerate(loader, 1):
        seen += numbers(batch)
        if step % 10 == 0:
            weights = {"w": torch.full((1000,), float(step)), "loader": loader.state_dict()}
            dcp.save(weights, checkpoint_id=str(step), storage_writer=writer)
            saved += 1
    assert saved >= 4
    assert sorted(seen) == list(range(COUNT))
    weights = {"w": torch.zeros(1000), "loader": make().state_dict()}
    dcp.load(weights, checkpoint_id="30", storage_reader=StorageReader(str(path), "run"))
    assert torch.equal(weights["w"], torch.full((1000,), 30.0))
    resumed = make()
    resumed.load_state_dict(weights["loader"])
    assert take(resumed) == seen[240:]
