"""An NVMe/TCP target in Python that follows the specification, or violates it by a script.

It is for tests of the initiator and of the layers above it. ``ScriptedTarget`` runs a target in a
thread. ``Subsystem`` and ``Namespace`` define what it exports, ``faults`` its possible faults, and
``script`` when they happen. Requires trio (the extra ``mount``).

Layers, each of which calls only those below it: ``scripted`` (the target in its thread), ``server``
(connections), ``queue``, ``controller``, ``subsystem``, ``namespace`` and ``reservation``;
``command``, ``identify`` and ``pdu`` encode and decode.

    with ScriptedTarget() as target:
        device = open_device(target.uri())
"""

from tests.support.nvme.command import Event, Status
from tests.support.nvme.identify import DISCOVERY_NQN, AnaState, DiscoveryRecord, Settings
from tests.support.nvme.namespace import Namespace, SlowNamespace
from tests.support.nvme.reservation import ReservationType
from tests.support.nvme.script import Fault, FaultScript, Fragments
from tests.support.nvme.scripted import DEFAULT_NQN, ScriptedTarget
from tests.support.nvme.server import Transport
from tests.support.nvme.subsystem import Subsystem

__all__ = [
    "DEFAULT_NQN",
    "DISCOVERY_NQN",
    "AnaState",
    "DiscoveryRecord",
    "Event",
    "Fault",
    "FaultScript",
    "Fragments",
    "Namespace",
    "ReservationType",
    "ScriptedTarget",
    "Settings",
    "SlowNamespace",
    "Status",
    "Subsystem",
    "Transport",
]
