"""What the hooks use of a spawner of JupyterHub, for tests that run the hooks without a hub."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any


def spawner_of(user: str, *groups: str, **traits: Any) -> Any:
    """Return a spawner of a user's only server."""
    named = [SimpleNamespace(name=group) for group in groups]
    owner = SimpleNamespace(name=user, groups=named, spawners={})
    log = logging.getLogger("hub")
    spawner = SimpleNamespace(user=owner, environment={}, log=log, active=True, **traits)
    owner.spawners[""] = spawner
    return spawner
