"""An NVMe/TCP target in Python: honest by the specification, or faulty by a script.

For tests of the initiator and of what is built on it. ``ScriptedTarget`` runs one in a thread;
``Subsystem`` and ``Namespace`` say what it offers, ``faults`` what it may do wrong, and ``script``
when. Needs trio (the extra ``mount``).

    with ScriptedTarget() as target:
        device = open_device(target.uri())
"""

from dlfs.testing.nvme.command import Event, Status
from dlfs.testing.nvme.identify import DISCOVERY_NQN, DiscoveryRecord, Settings
from dlfs.testing.nvme.namespace import Namespace, SlowNamespace
from dlfs.testing.nvme.reservation import ReservationType
from dlfs.testing.nvme.script import Fault, FaultScript, Fragments
from dlfs.testing.nvme.scripted import DEFAULT_NQN, ScriptedTarget
from dlfs.testing.nvme.server import Transport
from dlfs.testing.nvme.subsystem import Subsystem

__all__ = [
    "DEFAULT_NQN",
    "DISCOVERY_NQN",
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
