"""Fixtures: volumes and their mounts."""

from __future__ import annotations

import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlfs._native.fuse import is_built
from dlfs.base.units import MIB
from dlfs.mount.supervise import background
from tests.fuse.keeping import make_volume
from tests.fuse.mounting import (
    EMPTY_DIRECTORIES,
    Mount,
    Prepared,
    World,
    add_dataset,
    lacks_uring,
    mounted,
    sample_tree,
    served_by,
)
from tests.support.processes import MountServer
from tests.support.volumes import new_volume


@pytest.fixture(scope="module", autouse=True)
def quick_servers() -> Iterator[None]:
    """Have the background servers of mounts start in a moment, where they start in this process."""
    quick = SimpleNamespace(**{**vars(subprocess), "Popen": MountServer})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "subprocess", quick)
        yield


@pytest.fixture(scope="session", params=["native", "uring", "pyfuse3"])
def server(request: pytest.FixtureRequest) -> str:
    """Each server in turn, all of which know the same rules: `uring` is native over io_uring."""
    name: str = request.param
    if name != "pyfuse3" and not is_built():
        pytest.skip("built without the native server")
    reason = lacks_uring() if name == "uring" else None
    if reason is not None:
        pytest.skip(reason)
    return name


@pytest.fixture(scope="session")
def plain_volume(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A volume that no test changes: its path, the folder it was made from, its samples."""
    folder = tmp_path_factory.mktemp("plain")
    source = folder / "source"
    files = sample_tree(source)
    volume = new_volume(folder / "volume.img", size_bytes=32 * MIB)
    for directory in EMPTY_DIRECTORIES:
        (source / directory).mkdir(parents=True)
    add_dataset(volume, "train", files, EMPTY_DIRECTORIES)
    return Prepared(volume, source, files)


@pytest.fixture(scope="session")
def world(
    plain_volume: Prepared, server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """The unchanged volume, mounted for tests that only read."""
    volume, source, files = plain_volume
    folder = tmp_path_factory.mktemp("world")
    with mounted(volume, folder / "mnt", folder / "log", **served_by(server)) as mount:
        yield World(mount, source, files)


@pytest.fixture
def own_volume(tmp_path: Path) -> Path:
    """A small volume with one dataset `train`, for tests that change it."""
    volume = new_volume(tmp_path / "own.img", size_bytes=16 * MIB)
    add_dataset(volume, "train", {b"a": b"first" * 100, b"b/c": b"second" * 100})
    return volume


@pytest.fixture
def own_mount(own_volume: Path, server: str, tmp_path: Path) -> Iterator[Mount]:
    """The small volume, mounted."""
    with mounted(own_volume, tmp_path / "mnt", tmp_path / "log", **served_by(server)) as mount:
        yield mount


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A volume with the dataset `train` of ``keeping.FILES``, mounted with a keeper."""
    volume = make_volume(tmp_path)
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", fuse="native") as mount:
        yield mount


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def fuse_for_all() -> Iterator[None]:
    """/dev/fuse with the mode that udev gives it, where it has another."""
    device = Path("/dev/fuse")
    mode = stat.S_IMODE(device.stat().st_mode)
    device.chmod(0o666)
    yield
    device.chmod(mode)
