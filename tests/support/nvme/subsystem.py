"""An NVM subsystem: its namespaces, its allowed hosts, and its controllers.

Several targets may serve one subsystem at the same time (several paths to it), each in its own
thread; ``mutex`` guards everything that is not a single operation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tests.support.nvme.authentication import Authentication
from tests.support.nvme.identify import Settings
from tests.support.nvme.namespace import Namespace

if TYPE_CHECKING:
    from tests.support.nvme.controller import Controller

CNTLID_MAX = 0xFFEF


class Subsystem:
    """A subsystem, to which hosts connect by its NQN.

    Args:
        nqn: NQN of the subsystem.
        namespaces: its namespaces.
        hosts: NQNs of the hosts that may connect; None: any.
        settings: properties of its controllers.
        authentication: the keys that hosts need; None: none.
    """

    def __init__(
        self,
        nqn: str,
        namespaces: Sequence[Namespace],
        *,
        hosts: Iterable[str] | None = None,
        settings: Settings | None = None,
        authentication: Authentication | None = None,
    ) -> None:
        self.nqn = nqn
        self.namespaces = {namespace.nsid: namespace for namespace in namespaces}
        self.hosts = None if hosts is None else frozenset(hosts)
        self.settings = settings or Settings()
        self.authentication = authentication
        self.controllers: dict[int, Controller] = {}
        self.mutex = threading.Lock()
        self._last_number = 0

    def add(self, controller: Controller) -> int:
        """Give a new controller its number (CNTLID)."""
        with self.mutex:
            while True:
                self._last_number = self._last_number % CNTLID_MAX + 1
                if self._last_number not in self.controllers:
                    break
            self.controllers[self._last_number] = controller
            return self._last_number

    def remove(self, number: int) -> None:
        """Remove a controller. Idempotent."""
        with self.mutex:
            self.controllers.pop(number, None)

    def hosts_connected(self) -> dict[bytes, int]:
        """Return the controller number of each connected host, by host identifier."""
        return {found.host_id: number for number, found in list(self.controllers.items())}

    def lose(self, *, cache: bool, reservations: bool) -> None:
        """Undo what a power loss undoes: unflushed writes and reservations without persistence."""
        for namespace in self.namespaces.values():
            if cache:
                namespace.lose_cache()
            if reservations:
                namespace.reservations.lose_power()
