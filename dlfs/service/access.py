"""Decides which volumes of a node service a client may read, and what it sees of the service.

The kernel says which process, user and groups a client has (``sockets.Peer``). A client has come
through one of two kinds of sockets:

- the service's own socket. Root and the service's user may read every volume. A volume's rule names
  the others that may; without a rule these are the users and groups that may use the service.
- a published socket (``published``), whose owner has put it where only certain processes can reach
  it, such as those of one pod. Its clients may read the volumes that it was published for, whatever
  their users and groups are: in containers, these are not the machine's. They may change nothing.

A client sees what it may read: only these volumes are listed and counted for it. It learns that
another volume exists if it asks for that volume by label or UUID, and what would be needed.

Threads: the trio loop; ``sees`` any.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

from dlfs.base.wording import quote
from dlfs.errors import DeviceError
from dlfs.service.dataset_cache import ServedVolume
from dlfs.service.published import PublishedSockets
from dlfs.service.sockets import AllowList, Peer


@dataclass(eq=False)
class Access:
    """The rights of a service's clients.

    Attributes:
        allow: users and groups that may use the service, and read the volumes without a rule.
        group: group of the service's socket, which may do so if ``allow`` names no group; None:
            there is no such group.
        sockets: the published sockets.
    """

    allow: AllowList = field(default_factory=AllowList)
    group: int | None = None
    sockets: PublishedSockets = field(default_factory=PublishedSockets)

    def is_owner(self, peer: Peer) -> bool:
        """Return True for root and the service's user at the service's own socket."""
        return not peer.entrance and peer.uid in (0, os.geteuid())

    def may_connect(self, peer: Peer, volumes: Iterable[ServedVolume]) -> bool:
        """Return True if a peer may use the service: it may read a volume, or those to come."""
        if peer.entrance:
            return peer.entrance in self.sockets
        return self.allow.allows(peer, self.group) or any(
            self.may_read(peer, volume) for volume in volumes
        )

    def may_read(self, peer: Peer, volume: ServedVolume) -> bool:
        """Return True if a peer may read a volume."""
        if peer.entrance:
            return volume.uuid in self.sockets.volumes_of(peer.entrance)
        if volume.rule is not None:
            return volume.rule.allows(peer)
        return self.allow.allows(peer, self.group)

    def readable(self, peer: Peer, volumes: Iterable[ServedVolume]) -> list[ServedVolume]:
        """Return the volumes that a peer may read."""
        return [volume for volume in volumes if self.may_read(peer, volume)]

    def check_read(self, peer: Peer, volume: ServedVolume) -> None:
        """Check that a peer may read a volume.

        Raises:
            DeviceError: it may not (EACCES).
        """
        if not self.may_read(peer, volume):
            raise self.refusal(peer, volume.label or str(volume.uuid), volume.uuid)

    def check_owner(self, peer: Peer, action: str) -> None:
        """Check that a peer may change the service.

        Raises:
            DeviceError: it may not (EACCES).
        """
        if not self.is_owner(peer):
            who = "root and the service's user may, at the service's own socket"
            raise DeviceError(f"{action}: {peer.user} may not; {who}", errno.EACCES)

    def sees(self, viewer: Peer, other: Peer, volumes: set[UUID], may: set[UUID]) -> bool:
        """Return True if the statistics for a client show another one.

        They show the clients of the same user or published socket, and at the service's own socket
        all that read nothing but volumes that the viewer may read, too.

        Args:
            viewer: the client that asks.
            other: the other client.
            volumes: volumes of which that one has datasets open.
            may: volumes that the viewer may read.
        """
        if self.is_owner(viewer):
            return True
        if viewer.account == other.account:
            return True
        return not viewer.entrance and not other.entrance and bool(volumes) and volumes <= may

    def refusal(self, peer: Peer, name: str, volume: UUID) -> DeviceError:
        """Return the error for a peer that may not read a volume, which it asked for by a name."""
        needed = (
            f"a socket that 'dlfs publish' makes for this volume ({volume})"
            if peer.entrance
            else f"'dlfs serve --allow {name}=user:{peer.uid}', or 'dlfs attach --allow "
            f"user:{peer.uid}'"
        )
        return DeviceError(
            f"read volume {quote(name)}: {peer.user} may not ({peer.process}); needed: {needed}",
            errno.EACCES,
        )
