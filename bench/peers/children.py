"""The parent's side of a child process, and who looks at the memory of several meanwhile."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.contestant import WrongBytesError
from bench.machine import ROOT, Unavailable
from bench.peers.child import Job
from bench.peers.processes import descendants, pss_bytes

CONVERSION_SECONDS, ANSWER_SECONDS = 400.0, 150.0
"""That a child may take for an answer: one peer that hangs must not take the time of all."""

LOOK_SECONDS = 0.5
"""Between two looks at the memory of processes: each walks their page tables."""


class Child:
    """A fresh interpreter that does one job.

    Args:
        job: what.
        log: file for what the peer prints.
    """

    def __init__(self, job: Job, log: Path) -> None:
        self._log, self._verb = log, job.verb
        command = [sys.executable, "-m", "bench.peers.child"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self.pid = self._process.pid
        self.tell(json.dumps(asdict(job)))

    def tell(self, line: str) -> None:
        """Write a line; one that ended is found out by ``answer``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            Unavailable: the peer lacks something, failed, or did not answer in time.
            WrongBytesError: it gave other bytes than the source has.
        """
        assert self._process.stdout is not None
        seconds = CONVERSION_SECONDS if self._verb == "prepare" else ANSWER_SECONDS
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise Unavailable(f"no answer within {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"it failed: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        if "wrong" in answer:
            raise WrongBytesError(answer["wrong"])
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.wait()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it; by force what did not do its job to the end."""
        if kind is not None:
            self._process.kill()
        self._process.communicate()


class MemoryWatch:
    """Looks at the memory of processes and of all below them until it is left.

    Attributes:
        start_bytes: together, at the first look (PSS).
        peak_bytes: at most.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.start_bytes = self.peak_bytes = 0

    def look(self) -> None:
        """Now."""
        everyone = {pid for root in self._pids for pid in (root, *descendants(root))}
        now_bytes = pss_bytes(everyone)
        self.start_bytes = self.start_bytes or now_bytes
        self.peak_bytes = max(self.peak_bytes, now_bytes)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.look()

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
