"""A volume that is recomposed while two readers, a node service and a mount read it.

In each round the volume grows and shrinks, the service attaches another volume and detaches it, one
of the two paths to the storage node is lost and returns, and the node restarts. A seed chooses the
order and the devices. A device that has left the volume is overwritten at once. Every epoch of two
readers, of four clients of the service and of the mount is exact, and nothing stays open.

DLFS_RECOMPOSING_ROUNDS and DLFS_RECOMPOSING_SEED choose the rounds.
"""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import open_device
from dlfs.errors import DeviceError
from dlfs.mount.native_server import THREADS_MAX
from dlfs.service.client import attach, detach
from tests.fault.recomposing import (
    ABSENT_S,
    SETS,
    Report,
    Usage,
    file_memory,
    name_of,
    read_file,
    samples_of,
)
from tests.fuse.mounting import mounted
from tests.nvmet.guest import free_port
from tests.nvmet.volumes import assert_whole, read_epoch
from tests.service.serving import Service
from tests.spdk.target import Namespace as SpdkNamespace
from tests.spdk.target import SpdkTarget
from tests.support.descriptors import open_names
from tests.support.nvme import AnaState, Namespace, ScriptedTarget, Settings, Subsystem
from tests.support.volumes import write_dataset
from tests.support.waiting import wait_for

ROUNDS = int(os.environ.get("DLFS_RECOMPOSING_ROUNDS", "2"))
SEED = int(os.environ.get("DLFS_RECOMPOSING_SEED", "16"))
ROOT = Path(__file__).parents[2]
PAUSE_S = 0.3 if ROUNDS < 10 else 0.02
"""Pause of a reader after an epoch. CI has no time for more load."""
NQN = "nqn.2024-01.org.dlfs.test:recomposing"
SIZE = 6 * MIB
KEPT_BYTES = 1 * MIB
"""Beginning of a device that its next user does not overwrite, with the record of URIs."""
TIMES = {"connect_ms": 5_000}
DESCRIPTORS_MORE = 4
"""Descriptors by which two counts of a reader may differ: those of one more device, since it may be
about to follow its dataset."""
WORKERS_MAX = 40
"""Threads that the service starts when they are needed. Unused ones end after 10 s."""
RESIDENT_MORE_BYTES = 24 * MIB

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.timeout(300 + 30 * ROUNDS),
]


# ---- the storage node ----------------------------------------------------------------------------


class Node(Protocol):
    """A storage node with three namespaces, and two paths to each."""

    def uri(self, nsid: int) -> str:
        """Return the URI of a namespace, with both paths."""

    def lose_path(self, number: int, *, wholly: bool) -> None:
        """Take a path away.

        Args:
            number: 0 or 1.
            wholly: False to report the path as inaccessible instead.
        """

    def return_path(self, number: int) -> None:
        """Bring a path back."""

    def restart(self) -> None:
        """Restart the node with the paths that it has."""


class ScriptedNode:
    """Two scripted targets that serve one subsystem."""

    def __init__(self, paths: Sequence[ScriptedTarget]) -> None:
        self._paths = paths
        self._present = [True, True]

    def uri(self, nsid: int) -> str:
        first, second = self._paths
        return first.uri(nsid=nsid, path=f"127.0.0.1:{second.port}", **TIMES)

    def lose_path(self, number: int, *, wholly: bool) -> None:
        if not wholly:
            self._paths[number].set_ana_state(AnaState.INACCESSIBLE)
            return
        self._present[number] = False
        self._paths[number].kill()

    def return_path(self, number: int) -> None:
        if not self._present[number]:
            self._paths[number].restart()
        self._present[number] = True
        self._paths[number].set_ana_state(AnaState.OPTIMIZED)

    def restart(self) -> None:
        present = [
            path for path, is_present in zip(self._paths, self._present, strict=True) if is_present
        ]
        for path in present:
            path.kill()
        for path in present:
            path.restart()


@contextmanager
def scripted_node(_folder: Path) -> Iterator[Node]:
    subsystem = Subsystem(
        NQN, [Namespace(SIZE, nsid=nsid) for nsid in (1, 2, 3)], settings=Settings(ana=True)
    )
    with ScriptedTarget([subsystem]) as first, ScriptedTarget([subsystem]) as second:
        yield ScriptedNode([first, second])


class SpdkNode:
    """SPDK's target with files as namespaces, listening at two ports."""

    def __init__(self, target: SpdkTarget) -> None:
        self._target = target
        self._ports = (target.port, free_port())
        self._present = [True, True]
        self._listen(1, "add")

    def uri(self, nsid: int) -> str:
        return self._target.tcp_uri(NQN, nsid, path=f"127.0.0.1:{self._ports[1]}", **TIMES)

    def _address(self, number: int) -> dict[str, str]:
        port = str(self._ports[number])
        return {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port}

    def _listen(self, number: int, action: str) -> None:
        address = self._address(number)
        self._target.call(f"nvmf_subsystem_{action}_listener", nqn=NQN, listen_address=address)

    def lose_path(self, number: int, *, wholly: bool) -> None:
        del wholly  # this subsystem reports no states
        self._present[number] = False
        self._listen(number, "remove")

    def return_path(self, number: int) -> None:
        self._present[number] = True
        self._listen(number, "add")

    def restart(self) -> None:
        self._target.kill()
        self._target.start()  # listens at the first port
        if self._present[1]:
            self._listen(1, "add")
        if not self._present[0]:
            self._listen(0, "remove")


@contextmanager
def spdk_node(folder: Path) -> Iterator[Node]:
    with SpdkTarget() as target:
        paths = [folder / f"namespace{nsid}" for nsid in (1, 2, 3)]
        with target.subsystem(NQN, [SpdkNamespace(SIZE, path=path) for path in paths]):
            yield SpdkNode(target)


# ---- the readers ---------------------------------------------------------------------------------


class Readers:
    """Processes that read until the end of a ``with`` statement."""

    def __init__(self) -> None:
        self.reports: dict[str, Report] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.recomposing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def start(self, name: str, kind: str, uri: str) -> None:
        """Start a reader."""
        assert self._process.stdin is not None
        request = {"name": name, "kind": kind, "uri": uri, "seed": len(name), "pause_s": PAUSE_S}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = Report.parse(line)
            self.reports[found.name] = found

    def read_on(self, names: Sequence[str], epochs: int) -> None:
        """Wait until each of some readers has read that many more epochs, without an error."""
        before = {name: self.reports[name].epochs if name in self.reports else 0 for name in names}

        def done() -> bool:
            for found in list(self.reports.values()):
                assert found.error is None, f"{found.name}: {found.error}"
            reports = [self.reports.get(name) for name in names]
            return all(
                found is not None and found.epochs >= before[found.name] + epochs
                for found in reports
            )

        wait_for(done, f"{epochs} epochs of each reader")

    def usage(self) -> dict[str, Usage]:
        """Return the resources of each reader after its last epoch."""
        return {name: found.usage for name, found in self.reports.items()}

    def close(self) -> None:
        """End all readers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._thread.join()
        self._process.stdout.close()
        self._process.wait()


# ---- the rounds ----------------------------------------------------------------------------------


class Rounds:
    """Changes what a volume, a service and a storage node consist of, as a seed decides."""

    def __init__(self, seed: int, node: Node, files: Sequence[str], service: Service) -> None:
        self.chance = random.Random(seed)
        self._node = node
        self._files = files
        self._service = service
        self._devices = [*files, node.uri(1), node.uri(2)]
        self._members = [files[0], node.uri(1)]
        self._other = node.uri(3)
        self._lost = 0

    def steps(self) -> Iterator[Callable[[], None]]:
        """Return the steps of a round, in an order that the seed chooses."""
        more = self.chance.randrange(1, 3)
        sequences: list[list[Callable[[], None]]] = [
            [self.attach, self.detach],
            [self.grow] * more + [self.shrink] * more,
            [self.lose_path, self.return_path],
            [self._node.restart],
        ]
        while sequences := [sequence for sequence in sequences if sequence]:
            yield self.chance.choice(sequences).pop(0)

    def grow(self) -> None:
        unused = [uri for uri in self._devices if uri not in self._members]
        self._grow(self.chance.choice(unused))

    def shrink(self) -> None:
        self._shrink([self.chance.choice(self._members)])

    def move_to(self, uri: str) -> None:
        """Make a device the only member."""
        if uri not in self._members:
            self._grow(uri)
        if leaving := [member for member in self._members if member != uri]:
            self._shrink(leaving)

    def _grow(self, uri: str) -> None:
        with dlfs.open(self._members) as volume:
            volume.grow(uri)
        self._members.append(uri)

    def _shrink(self, leaving: Sequence[str]) -> None:
        """Remove members; the next user of their devices overwrites these."""
        with dlfs.open(self._members) as volume:
            assert len(volume.shrink(leaving).removed) == len(leaving)
        for uri in leaving:
            self._members.remove(uri)
            with open_device(uri, writable=True) as device:
                for offset in range(KEPT_BYTES, SIZE, MIB):  # each in time on a busy machine
                    device.write(offset, self.chance.randbytes(MIB))

    def attach(self) -> None:
        attach(self._service.uri, self._other)
        with (
            dlfs.connect(self._service.uri, volume="other", timeout_s=ABSENT_S) as volume,
            volume[name_of(SETS)] as dataset,
        ):
            assert_whole(read_epoch(dataset, 1), samples_of(SETS))

    def detach(self) -> None:
        def ended() -> bool:
            try:
                detach(self._service.uri, "other")
            except DeviceError as error:
                if error.errno != errno.EBUSY:
                    raise
                return False  # the service has not seen yet that its client left
            return True

        wait_for(ended, "the other volume to be detached")

    def lose_path(self) -> None:
        self._lost = self.chance.randrange(2)
        self._node.lose_path(self._lost, wholly=self.chance.random() < 0.5)

    def return_path(self) -> None:
        self._node.return_path(self._lost)


def write_sets(uri: str, label: str, numbers: Sequence[int]) -> None:
    """Make a volume with some datasets."""
    dlfs.format_volume(uri, label=label, chunk_bytes=16 * KIB)
    with dlfs.open(uri) as volume:
        for number in numbers:
            write_dataset(volume, name_of(number), samples_of(number))


class Servers:
    """A node service and a mount of the volume.

    Args:
        stack: ends them.
        uri: URIs of members of the volume, a file and a namespace.
        folder: folder for their files; is created.
    """

    def __init__(self, stack: ExitStack, uri: str, folder: Path) -> None:
        folder.mkdir()
        self.service = Service([uri], folder / "s.sock", "--cache", "1MiB")
        stack.callback(self.service.close)
        self.service.wait_ready()
        self.mount = stack.enter_context(
            mounted(uri, folder / "mnt", folder / "log", cache_bytes=64 * KIB, busy_poll_us=0)
        )
        self._memory = file_memory()

    def read_all(self, *, alone: bool = False) -> None:
        """Read all datasets through the mount, and through the service, which closes others.

        Args:
            alone: True if the service has no other client.
        """
        for number in reversed(range(SETS)):
            self._read_files(number)
            with (
                dlfs.connect(self.service.uri, volume="main", timeout_s=ABSENT_S) as volume,
                volume[name_of(number)] as dataset,
            ):
                assert_whole(read_epoch(dataset, 1), samples_of(number))
            if alone:  # a dataset that is in use stays open when the next one is opened
                wait_for(lambda: not self._datasets_in_use(), "the end of the client's session")

    def _datasets_in_use(self) -> int:
        return sum(dataset["users"] > 0 for dataset in self.service.snapshot()["datasets"])

    def _read_files(self, number: int) -> None:
        folder = os.fsencode(self.mount / name_of(number))
        for path, data in samples_of(number).items():
            assert read_file(os.path.join(folder, path), self._memory) == data

    def usage(self) -> dict[str, Usage]:
        """Return the resources of both."""
        return {"service": Usage.of(self.service.pid), "mount": Usage.of(self.mount.pid)}

    def descriptors(self) -> dict[str, Counter[str]]:
        """Return the number of open files of each name, of both."""
        return {"service": open_files(self.service.pid), "mount": open_files(self.mount.pid)}


def open_files(pid: int) -> Counter[str]:
    """Return the number of open files of a process by name; sockets and pipes have none."""
    return Counter(os.path.basename(name).partition(":[")[0] for name in open_names(pid))


class World:
    """A volume, the service and the mount of it, and its readers."""

    def __init__(self, stack: ExitStack, folder: Path, node: Node) -> None:
        self.files = [str(folder / f"file{number}") for number in range(2)]
        for file in self.files:
            Path(file).touch()
            os.truncate(file, SIZE)
        write_sets(self.files[0], "main", range(SETS))
        write_sets(node.uri(3), "other", [SETS])
        # A reader follows a volume to places like those that it was given: both kinds.
        with dlfs.open(self.files[0]) as volume:
            self.uri = volume.grow(node.uri(1)).uri
        self.servers = Servers(stack, self.uri, folder / "servers")
        self.readers = Readers()
        stack.callback(self.readers.close)
        self.rounds = Rounds(SEED, node, self.files, self.servers.service)

    def start_readers(self) -> list[str]:
        """Start the readers, and return their names."""
        service = self.servers.service.uri
        kinds = {"local": self.uri, "local-anew": self.uri}
        kinds |= {"client": service, "client-anew": service}
        kinds |= {"files": str(self.servers.mount.directory)}
        names = [*kinds, "client-anew-2", "client-anew-3"]
        for name in names:
            kind = name.rstrip("-0123456789")
            self.readers.start(name, kind, kinds[kind])
        return names

    def settle(self, names: Sequence[str]) -> None:
        """Have every process that reads open the volume on its first device alone."""
        for file in reversed(self.files):
            self.rounds.move_to(file)
            self.servers.read_all(alone=not names)
            self.readers.read_on(names, 2)


def check_no_leak(before: dict[str, Usage], after: dict[str, Usage]) -> None:
    """Compare the resources of the same readers at two times."""
    for name, then in before.items():
        now = after[name]
        assert now.descriptors <= then.descriptors + DESCRIPTORS_MORE, f"{name}: {then}, {now}"
        assert now.threads <= then.threads + 4, f"{name}: {then}, {now}"
        check_memory(name, then, now)


def check_memory(name: str, then: Usage, now: Usage) -> None:
    """Compare the memory of the same process at two times."""
    assert now.resident_bytes <= then.resident_bytes + RESIDENT_MORE_BYTES, f"{name}: {then}, {now}"


def check_servers(old: Servers, new: Servers) -> None:
    """Check that servers have no more files open than new ones, which have read the same.

    Args:
        old: the servers; their last work may be about to end. They have fewer queue pairs than new
            ones, since they read no directory anew.
        new: servers that were started with the volume as it is.
    """
    new.read_all(alone=True)
    threads = new.usage()
    allowed = {"service": WORKERS_MAX if ROUNDS < 10 else 0, "mount": THREADS_MAX}

    def surplus() -> list[str]:
        found = []
        expected = new.descriptors()
        for name, now in old.descriptors().items():
            more = now - expected[name]
            if more:
                found += [f"{name}: {count} more of {file}" for file, count in more.items()]
        for name, usage in old.usage().items():
            if usage.threads > threads[name].threads + allowed[name]:
                found.append(f"{name}: {usage.threads} threads, new: {threads[name].threads}")
        return found

    def settled() -> bool:
        if not surplus():
            return True
        # A queue pair that has been idle for long is destroyed at the next use of another one.
        old.read_all(alone=True)
        new.read_all(alone=True)
        return False

    wait_for(settled, lambda: f"nothing more than the new processes have: {surplus()}")


@pytest.mark.parametrize(
    "make_node", [scripted_node, pytest.param(spdk_node, marks=pytest.mark.spdk)]
)
def test_every_epoch_is_exact(make_node, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    with ExitStack() as stack:
        node = stack.enter_context(make_node(tmp_path))
        world = World(stack, tmp_path, node)
        servers = world.servers
        servers.read_all(alone=True)
        idle = servers.usage()
        names = world.start_readers()
        world.readers.read_on(names, 2)
        busy = world.readers.usage()
        for number in range(ROUNDS):
            for step in world.rounds.steps():
                print(f"round {number}: {step.__name__}", end="", flush=True)
                began = time.monotonic()
                step()
                print(f", {time.monotonic() - began:.1f} s", flush=True)
            world.readers.read_on(names, 1)
        world.settle(names)
        check_no_leak(busy, world.readers.usage())
        world.readers.close()
        world.settle([])  # no longer read by several at a time, which takes queue pairs
        check_servers(servers, Servers(stack, world.files[0], tmp_path / "new"))
        for name, now in servers.usage().items():
            check_memory(name, idle[name], now)
        for each in world.readers.reports.values():
            print(each)
        servers.service.stop()
