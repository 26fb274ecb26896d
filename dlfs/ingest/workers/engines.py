"""Which engine runs the workers of an import: ``parse_workers`` reads the option ``--workers``.

``4`` are four processes of this host. ``ray`` and ``ray:ADDRESS`` are tasks of a Ray cluster, whose
address is written as for ``ray.init``: ``auto``, ``local``, ``HOST:PORT``, or ``ray://HOST:PORT``.
Behind ``?`` come options, joined by ``&``:

- ``workers=8``: so many workers, which Ray places; without it, one on each node.
- ``cpus=2``: processors that Ray reserves for each worker, 1 by default.
- ``resource=NAME:AMOUNT``: reserves a resource of Ray for each worker.

Workers that another engine starts, such as Slurm, join by a file: see ``joining``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dlfs.errors import UsageError

WORKERS_MAX = 256
"""Most workers of an import."""
AUTO, LOCAL = "auto", "local"

_CLIENT = "ray://"
_OPTIONS = ("workers", "cpus", "resource")
_EXPECTED = (
    "a number of processes, ray, ray:ADDRESS or ray://HOST:PORT, with options workers=N, cpus=N "
    "and resource=NAME:AMOUNT behind a ?"
)


@dataclass(frozen=True)
class ProcessWorkers:
    """Workers that are processes of this host.

    Attributes:
        count: number of processes.
    """

    count: int


@dataclass(frozen=True)
class RayWorkers:
    """Workers that are tasks of a Ray cluster.

    Attributes:
        address: address of the cluster, as for ``ray.init``.
        count: number of workers; None for one on each node.
        cpus: processors that each reserves.
        resources: amounts of further resources that each reserves, by their names.
    """

    address: str
    count: int | None
    cpus: float
    resources: dict[str, float]

    @property
    def host(self) -> str | None:
        """The host in the address; None without."""
        address = self.address.removeprefix(_CLIENT)
        return None if address in (AUTO, LOCAL) else address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port in the address; 0 without."""
        port = self.address.rpartition(":")[2]
        return int(port) if port.isdecimal() else 0


Workers = ProcessWorkers | RayWorkers


def parse_workers(text: str) -> Workers:
    """Return the workers that an option stands for.

    Raises:
        UsageError: it stands for none.
    """
    if text.isdecimal() and text.isascii():
        return ProcessWorkers(_count(text, text))
    body, separator, query = text.partition("?")
    if body == "ray":
        address = AUTO
    elif body.startswith(_CLIENT):
        address = body
    elif body.startswith("ray:"):
        address = body.removeprefix("ray:")
    else:
        raise _reject(text, text)
    hostless = not body.startswith(_CLIENT) and address in (AUTO, LOCAL)
    if not hostless and not re.fullmatch(r"[^/\s]+:\d{1,5}", address.removeprefix(_CLIENT)):
        raise UsageError(f"--workers {text}: expected a host and a port, got {address!r}")
    count, cpus, resources = None, 1.0, {}
    for pair in query.split("&") if separator else ():
        key, equals, value = pair.partition("=")
        if key not in _OPTIONS or not equals:
            raise _reject(text, pair)
        if key == "workers":
            count = _count(text, value)
        elif key == "cpus":
            cpus = _amount(text, value)
        else:
            name, _, amount = value.partition(":")
            resources[name] = _amount(text, amount)
    return RayWorkers(address, count, cpus, resources)


def _count(text: str, value: str) -> int:
    if not (value.isdecimal() and value.isascii()) or not 1 <= int(value[:9]) <= WORKERS_MAX:
        raise UsageError(f"--workers {text}: expected 1..{WORKERS_MAX} workers, got {value!r}")
    return int(value)


def _amount(text: str, value: str) -> float:
    """Return an amount of a resource: a whole number, or a share of one."""
    if not re.fullmatch(r"\d{1,6}(\.\d{1,4})?", value, re.ASCII):
        raise UsageError(f"--workers {text}: expected an amount such as 1 or 0.5, got {value!r}")
    return float(value)


def _reject(text: str, got: str) -> UsageError:
    return UsageError(f"--workers {text}: expected {_EXPECTED}, got {got!r}")
