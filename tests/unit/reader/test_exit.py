"""A program that ends in the middle of an epoch ends as it wanted to."""

import subprocess
import sys

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
