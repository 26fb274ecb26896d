"""Volumes outlive their driver, holder and servers; what a killed call has left is removed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.driving import Plant, Refused, error_of
from tests.support.waiting import retried, wait_for

pytestmark = [pytest.mark.root, pytest.mark.fuse]

KILLS = int(os.environ.get("DLFS_CSI_KILLS", "2"))


@pytest.fixture(scope="module")
def node(user: str) -> Iterator[Plant]:
    """A node of its own for all tests here, each of which leaves nothing of it stopped."""
    plant = Plant(user)
    yield plant
    plant.close()


def test_driver_that_is_killed_at_any_moment_finds_everything_again(
    node: Plant, volume: Path
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    moments = random.Random(seed)
    target = node.targets / "target"
    for _ in range(KILLS):
        timer = threading.Timer(moments.uniform(0.0, 0.8), node.driver.kill)
        timer.start()
        with contextlib.suppress(Refused):
            while True:
                node.publish(target, str(volume))
                node.unpublish(target)
        timer.join()
        node.driver.wait()
        node.start()
        retried(lambda: node.publish(target, str(volume)), Refused)
        assert (target / "animals/cat/0.txt").read_text() == "first"
    node.unpublish(target)
    wait_for(lambda: node.left() == [], lambda: f"nothing left, got {node.left()}")


def test_readers_go_on_when_servers_holder_and_driver_die(node: Plant, volume: Path) -> None:
    target = node.targets / "target"
    node.publish(target, str(volume), attributes={"dataset": "animals"})
    file = os.open(target / "cat/0.txt", os.O_RDONLY)
    try:
        for pid in node.servers(target):
            os.kill(pid, signal.SIGKILL)
        assert (target / "dog/1.txt").read_text() == "second"
        node.kill()
        node.holder.kill()
        node.holder.wait()
        node.start_holder()
        node.start()
        wait_for(lambda: node.held(target).present, "the mount given back")
        for pid in node.servers(target):
            os.kill(pid, signal.SIGKILL)
        assert os.pread(file, 5, 0) == b"first"
        assert sorted(os.listdir(target)) == ["cat", "dog"]
        node.publish(target, str(volume), attributes={"dataset": "animals"})
    finally:
        os.close(file)
    node.unpublish(target)
    assert node.left() == []


def test_a_dead_mount_is_reported_and_mounted_anew(node: Plant, volume: Path) -> None:
    target = node.targets / "target"
    node.publish(target, str(volume), attributes={"dataset": "animals"})
    node.driver.send_signal(signal.SIGSTOP)
    node.holder.kill()
    node.holder.wait()
    for pid in node.servers(target):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: error_of(target) == errno.ENOTCONN, "the end of the mount")
    node.driver.send_signal(signal.SIGCONT)
    found = node.call("NodeGetVolumeStats", volume_id=target.name, volume_path=str(target))
    assert found.volume_condition.abnormal
    assert "ENOTCONN" in found.volume_condition.message
    node.start_holder()

    def read() -> str:
        return (target / "cat/0.txt").read_text()

    assert retried(read, OSError) == "first"
    retried(lambda: node.unpublish(target), Refused)  # the driver may not have ended with it
    assert node.left() == []


def test_after_a_restart_of_the_node_nothing_is_left(node: Plant, volume: Path) -> None:
    target = node.targets / "target"
    node.publish(target, str(volume))
    node.kill()
    node.holder.kill()
    node.holder.wait()
    servers = node.servers()
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    subprocess.run(["umount", "-l", target], check=True)
    wait_for(lambda: not node.servers(), "the end of the servers")
    node.start_holder()
    node.start()
    wait_for(lambda: node.left() == [], lambda: f"nothing left, got {node.left()}")


def test_without_its_holder_the_driver_is_not_ready(node: Plant, volume: Path) -> None:
    node.holder.kill()
    node.holder.wait()
    with pytest.raises(Refused, match=r"FAILED_PRECONDITION: .*none runs there"):
        node.call("Probe")
    with pytest.raises(Refused, match=r"UNAVAILABLE: .*none runs there"):
        node.publish(node.targets / "target", str(volume))
    node.start_holder()
    wait_for(lambda: node.left() == [], "the next look")
    assert node.call("Probe").ready.value
