"""A trainer's container that reads files of a mount, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.containers.podman import Container, Podman
from tests.support.waiting import wait_for

TRAINER = 20001
"""User of trainers' containers."""
SAMPLES = {f"{number:03}": bytes([number]) * 5000 for number in range(200)}
CAPABILITIES = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
assert int(status["CapEff"], 16) == 0 and int(status["CapBnd"], 16) == 0
"""
FILES = """
import os
from pathlib import Path

def read(folder):
    files = sorted(Path(folder).iterdir())
    for file in files:
        with file.open("rb") as opened:
            assert set(opened.read()) == {int(file.name)}
            # So that the next round asks the server.
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    print(len(files), flush=True)
"""
ROUNDS = """
import errno, time
while True:
    try:
        read(FOLDER)
    except OSError as error:
        # Of the dead mount; then of root's directory below it; then of the new mount, until the
        # directory of the dataset is over it.
        known = (errno.ENOTCONN, errno.ECONNABORTED, errno.EACCES, errno.EISDIR, errno.ENOENT)
        if error.errno not in known:
            raise
        print("dead", errno.errorcode[error.errno], flush=True)
        time.sleep(0.05)
"""
"""Rounds that go on when the mount has died, until there is another one."""


BLOCKED = ("request_wait_answer", "folio_wait_bit_common")
"""Where the kernel has a process wait for a mount's server: for an answer, or a page."""


class Reader:
    """A container without capabilities that reads all files of a directory, round after round.

    Args:
        podman: where it runs.
        options: options of the container, with its volumes.
        folder: the directory, as the container sees it.
    """

    def __init__(self, podman: Podman, options: Sequence[str], folder: str) -> None:
        code = f"FOLDER = {folder!r}\n{CAPABILITIES}{FILES}{ROUNDS}"
        options = [*options, "--entrypoint", "python"]
        self.container: Container = podman.start("-c", code, options=options, user=TRAINER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.container.do("rm", "--force", "--time", "0")

    def wait_for_more(self) -> None:
        """Wait until it has read all files twice more; fail if it has ended."""
        before = self.rounds()

        def ready() -> bool:
            assert self.container.state["Running"], self.container.logs()
            return self.rounds() >= before + 2

        wait_for(ready, lambda: self.container.logs()[-2000:])

    def wait_blocked(self) -> None:
        """Wait until it waits for the answer of the mount's server."""
        waiting = Path(f"/proc/{self.container.state['Pid']}/wchan")
        wait_for(
            lambda: waiting.read_text() in BLOCKED,
            lambda: f"a request to the server, got {waiting.read_text()}",
        )

    def rounds(self) -> int:
        """Return how often it has read all files."""
        return self.container.logs().splitlines().count(str(len(SAMPLES)))

    def deaths(self) -> list[str]:
        """Return the errors of the mount that it has met."""
        return [line for line in self.container.logs().splitlines() if line.startswith("dead")]
