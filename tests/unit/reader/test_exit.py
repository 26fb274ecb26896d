"""A program that ends in the middle of an epoch, or of a read, ends as it wanted to."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nvme import Event, Fault, FaultScript, ScriptedTarget
from tests.support.nvme.faults import Silence
from tests.support.scripts import hear, running, tell
from tests.support.waiting import wait_for
from tests.unit.store.nodes import make_volume, serve, subsystem

PROGRAM = """
import sys
import dlfs

uri = "mem:exit?size=67108864"
dlfs.format_volume(uri)
with dlfs.open(uri) as volume, volume.writer("ds") as writer:
    for number in range(10_000):
        writer.add(str(number), bytes(4096))
dataset = dlfs.open(uri, memory_bytes=int(sys.argv[1]))["ds"]
epoch = dataset.batches(64, seed=1, shuffle=sys.argv[2])
batch = next(epoch)
print("done")
"""


def test_a_program_ends_well_with_an_epoch_open():
    """Its thread reads ahead until the process is gone, and nothing is taken away from under it."""
    ways = [(str(memory), order) for memory in (8 << 20, 64 << 20) for order in ("global", "chunk")]
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *way],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for way in ways
    ]
    ends = [(*program.communicate(timeout=60), program.returncode) for program in programs]
    assert ends == [("done\n", "", 0)] * len(programs)


READING = """
import sys
import threading
import dlfs
from dlfs.block import open_device

how, what, uri = sys.argv[1:]
if what == "device":
    read = lambda device=open_device(uri): device.read(0, 4096)
elif what == "samples":
    read = lambda dataset=dlfs.open(uri)["small"]: dataset.read(range(len(dataset)))
else:
    read = lambda epoch=dlfs.open(uri)["small"].batches(50, seed=1): list(epoch)
print("open", flush=True)
sys.stdin.readline()
threading.Thread(target=read, daemon=True).start()
sys.stdin.readline()
if how == "exit":
    sys.exit(3)
raise KeyError(how)
"""
EXIT_S = 20
"""Longest time in which a program ends, on a busy machine; the reads take longer."""


@pytest.mark.parametrize(
    ("what", "how"),
    [("device", "exit"), ("device", "interrupt"), ("samples", "exit"), ("epoch", "error")],
)
def test_a_program_ends_while_its_thread_reads(tmp_path: Path, what: str, how: str) -> None:
    """The device does not answer, and the thread does not end by itself for long."""
    _, (path,) = make_volume(tmp_path, "v", 1)
    with ScriptedTarget([subsystem("a", [serve(path)])]) as target:
        uri = target.uri(timeout_ms=600_000, keepalive_ms=0)
        with running(READING, how, what, uri, stderr=subprocess.DEVNULL) as program:
            assert hear(program) == "open"
            script = FaultScript([Fault(Event.READ, Silence(), times=None)])
            target.play(script)
            tell(program)
            wait_for(lambda: script.played, "a read that is not answered")
            if how == "interrupt":
                program.send_signal(signal.SIGINT)
            else:
                tell(program)
            code = program.wait(EXIT_S)
    assert code == {"exit": 3, "error": 1, "interrupt": -signal.SIGINT}[how]
