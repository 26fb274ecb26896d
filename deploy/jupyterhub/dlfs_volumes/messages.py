"""Messages about the volumes of a server that starts, for the page of its progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any


class Messages:
    """Lines about the volumes of a server that starts. Threads: the hub's event loop."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._changed = asyncio.Event()
        self._complete = False

    def add(self, line: str) -> None:
        """Add a line."""
        self._lines.append(line)
        self._wake()

    def complete(self) -> None:
        """Say that no line comes any more."""
        self._complete = True
        self._wake()

    async def follow(self) -> AsyncIterator[str]:
        """Yield all lines, the coming ones included, until they are complete."""
        shown = 0
        while True:
            while shown < len(self._lines):
                yield self._lines[shown]
                shown += 1
            if self._complete:
                return
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def messages_of(spawner: Any) -> Messages:
    """Return the messages of a spawner, which JupyterHub makes anew for each start."""
    found = getattr(spawner, "volume_messages", None)
    if found is None:
        found = spawner.volume_messages = Messages()
    return found


class VolumeProgress:
    """Shows messages about volumes on the page of a server's start: a base class of a spawner.

    Put it before the spawner's class: ``class Local(VolumeProgress, LocalProcessSpawner)``.
    """

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield events as ``Spawner.progress`` does, those about volumes first."""
        async for line in messages_of(self).follow():
            yield {"message": line}
        async for event in super().progress():  # type: ignore[misc]
            yield event
