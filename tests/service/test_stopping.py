"""Services in the background, and ``dlfs stop``: whatever a service was, nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs.directory.sharing import SHARED_ROOT
from dlfs.errors import DeviceError, ExistsError, NotFoundError, UsageError
from dlfs.mount.mountpoint import find_mount
from dlfs.mount.supervise.processes import is_dying
from dlfs.service.background import StartedService, start_service
from dlfs.service.process import NodeOptions
from dlfs.service.sockets import ServiceRecord
from dlfs.service.stopping import Ending, stop_service
from tests.service.serving import make_samples, make_volume
from tests.support.waiting import wait_for

SAMPLES = make_samples(50)
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_volume(tmp_path_factory.mktemp("volume") / "volume.img", SAMPLES)


class Place:
    """A folder for a service, and its socket and mount in it."""

    def __init__(self, folder: Path, volume: str) -> None:
        self.folder = folder
        self.socket = folder / "socket"
        self.uri = f"unix:{self.socket}"
        self.mount = folder / "mnt"
        self.volume = volume

    def start(self, *, mount: bool = False) -> StartedService:
        """Start a service in the background."""
        if mount:
            self.mount.mkdir()
        options = NodeOptions(
            volumes=[self.volume], socket=str(self.socket), mount=str(self.mount) if mount else None
        )
        return start_service(options, str(self.folder / "log"))

    def check_empty(self) -> None:
        """Check that nothing of a service is left but its log and the directory of its mount."""
        assert {path.name for path in self.folder.iterdir()} <= {"log", "mnt"}
        assert find_mount(self.mount) is None


@pytest.fixture
def place(tmp_path: Path, volume: str) -> Iterator[Place]:
    place = Place(tmp_path, volume)
    yield place
    with contextlib.suppress(ExistsError):
        stop_service(place.uri, TIMEOUT_S)


@pytest.mark.fuse
@pytest.mark.parametrize("signal_before", [None, signal.SIGSTOP, signal.SIGKILL])
def test_nothing_is_left(place: Place, signal_before: signal.Signals | None) -> None:
    started = place.start(mount=True)
    path, data = next(iter(SAMPLES.items()))
    reader = os.open(place.mount / "d" / os.fsdecode(path), os.O_RDONLY)  # the mount is busy
    with dlfs.connect(place.uri) as clients:
        assert clients["d"].get(path) == data
    assert os.read(reader, len(data)) == data
    if signal_before is None:
        assert stop_service(place.uri, TIMEOUT_S).ending == Ending.ENDED
    else:
        os.kill(started.pid, signal_before)
        killed = signal_before == signal.SIGKILL
        if killed:
            wait_for(lambda: is_dying(started.pid), "its end")
        ending = stop_service(place.uri, TIMEOUT_S if killed else 0.2).ending
        # A thread of the killed one may hold the lock for a moment.
        assert ending in ((Ending.DEAD, Ending.ENDED) if killed else (Ending.KILLED,))
    with contextlib.suppress(OSError):  # its server is gone
        os.close(reader)
    assert is_dying(started.pid)
    place.check_empty()
    assert stop_service(place.uri, TIMEOUT_S).ending == Ending.ABSENT


def test_another_service_can_follow(place: Place) -> None:
    os.kill(place.start().pid, signal.SIGKILL)
    again = place.start()
    with pytest.raises(ExistsError, match="a service listens there already"):
        place.start()
    with dlfs.connect(place.uri) as volume:
        assert len(volume["d"]) == len(SAMPLES)
    assert stop_service(place.uri, TIMEOUT_S).ending == Ending.ENDED
    assert "SIGTERM: ending" in (place.folder / "log").read_text()
    assert again.socket == str(place.socket)


def test_a_service_that_fails_says_why(place: Place) -> None:
    place.volume = str(place.folder / "nothing.img")
    with pytest.raises(NotFoundError, match=r"nothing\.img"):
        place.start()
    place.check_empty()


def test_a_killed_caller_leaves_no_service(place: Place) -> None:
    """The caller is killed when the service answers, before it says that the service shall stay."""
    code = "import os\nfrom dlfs.service import background\n"
    code += "background.keep = lambda _: os.kill(os.getpid(), 9)\n"
    code += "from dlfs.service.process import NodeOptions\n"
    code += f"options = NodeOptions(volumes=[{place.volume!r}], socket={str(place.socket)!r})\n"
    code += f"background.start_service(options, {str(place.folder / 'log')!r})\n"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: not place.socket.exists(), "the end of the service")
    assert "was interrupted" in (place.folder / "log").read_text()
    assert stop_service(place.uri, TIMEOUT_S).ending in (Ending.ABSENT, Ending.DEAD)
    place.check_empty()


def test_other_programs_stay(place: Place) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place.socket))
        other.listen()
        with pytest.raises(ExistsError, match="another process listens"):
            stop_service(place.uri, TIMEOUT_S)
    lock = place.folder / "socket.lock"
    started = place.start()
    record = ServiceRecord(os.getpid(), 1, None)
    text = lock.read_text()
    lock.write_text(json.dumps({"pid": record.pid, "pid_namespace": 1, "mount": None}))
    with pytest.raises(DeviceError, match="it runs in another container, as its process"):
        stop_service(place.uri, TIMEOUT_S)
    pid = os.getppid()
    lock.write_text(json.dumps({**json.loads(text), "pid": pid}))
    with pytest.raises(DeviceError, match=f"names process {pid}, which does not have it open"):
        stop_service(place.uri, TIMEOUT_S)
    lock.write_text("")
    with pytest.raises(DeviceError, match="does not name its process"):
        stop_service(place.uri, 0.0)
    lock.write_text(text)
    assert stop_service(place.uri, TIMEOUT_S).ending == Ending.ENDED
    assert is_dying(started.pid)
    with pytest.raises(UsageError, match="expected unix:"):
        stop_service(str(place.socket), TIMEOUT_S)


def test_shared_memory_of_killed_processes_is_removed(place: Place) -> None:
    folder = SHARED_ROOT / f"dlfs-{os.geteuid()}"
    code = f"import dlfs, os\nvolume = dlfs.open({place.volume!r})\ndataset = volume['d']\n"
    code += "print(dataset.paths()[0]); os.kill(os.getpid(), 9)\n"
    with dlfs.open(make_volume(place.folder / "other.img", SAMPLES)) as mine, mine["d"] as kept:
        subprocess.run([sys.executable, "-c", code], check=False)
        with dlfs.open(place.volume) as volume:
            left = f"{volume.uuid.hex}-"
            used = f"{mine.uuid.hex}-"
        assert any(path.name.startswith(left) for path in folder.iterdir())
        stop_service(place.uri, TIMEOUT_S)
        assert not any(path.name.startswith(left) for path in folder.iterdir())
        assert any(path.name.startswith(used) for path in folder.iterdir())
        assert kept.get(b"class0/00000") == SAMPLES[b"class0/00000"]
