"""Works out which share of an epoch this process takes from what the caller says of the ranks.

Ranks of tensor, pipeline and context parallelism must read the same samples, and ranks of data
parallelism different ones. The environment (``epoch.ranks``) knows ranks, but not which of them
need the same samples. The argument ``placement`` of everything that shares an epoch says it:

- a device mesh of one dimension of data, such as ``mesh["dp"]``: the ranks along it share the
  epoch;
- ``(mesh, names)``, with the names of the mesh's data dimensions, such as ``"dp"`` or
  ``["dp_replicate", "dp_shard"]``: ranks that differ in one of these share the epoch, ranks that
  differ in other dimensions read the same; no names: all ranks of the mesh read the same;
- a process group: its ranks share the epoch;
- ``Replicated(4)``: of the ranks that the environment knows, 4 consecutive ones read the same;
- ``Placement(rank, world_size)``: numbers;
- a function without arguments that returns one of these, for what does not exist yet.

It is worked out when an epoch begins, and again when another iteration continues the epoch.
Nothing here imports PyTorch: ``Mesh`` and ``Group`` are what is used of its classes.

Threads: any at once.
"""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard

from dlfs.base.arguments import check_integer
from dlfs.base.wording import join_words, show_value
from dlfs.epoch.ranks import (
    Placement,
    check_placement,
    is_launched,
    placement_of_environment,
    process_group,
)
from dlfs.errors import UsageError

_ACTION = "find this process's rank"
_EXPECTED = (
    "expected placement as a DeviceMesh of one dimension, (mesh, names of its data dimensions), a "
    "process group, Replicated(K), Placement(rank, world_size), or a function that returns one"
)
_NO_MEMBER = -100
"""``GroupMember.NON_GROUP_MEMBER``, which ``torch.distributed.new_group`` gives other ranks."""

_DATA_DIMENSIONS = ("dp", "ddp", "fsdp", "hsdp", "data", "batch", "replicate", "shard")
"""Beginnings of the names that dimensions of a mesh have whose ranks take different samples."""

_MODEL_DIMENSIONS = frozenset({"tp", "pp", "cp", "sp", "ep"})
"""Words in names of flattened dimensions, such as ``dp_shard_cp``, that are not only of data."""


class Mesh(Protocol):
    """The part of PyTorch's ``DeviceMesh`` that is used."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Name of each dimension."""

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks along a dimension."""

    def get_coordinate(self) -> Sequence[int] | None:
        """Return this rank's place in each dimension; None if it is no member."""


class Group(Protocol):
    """The part of PyTorch's ``ProcessGroup`` that is used."""

    def rank(self) -> int:
        """Return the rank of this process in the group."""

    def size(self) -> int:
        """Return the number of ranks in the group."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Groups of consecutive ranks that read the same samples.

    Attributes:
        ranks: ranks of each group, >= 1; divides the number of ranks.

    Raises:
        UsageError: it is no integer, or less than 1.
    """

    ranks: int

    def __post_init__(self) -> None:
        ranks = check_integer(self.ranks, 1, None, option="ranks", action="replicate samples")
        object.__setattr__(self, "ranks", ranks)


@dataclass(frozen=True, slots=True)
class Detached:
    """Stands for a mesh, group or function that stayed in the process that pickled its owner.

    Attributes:
        what: text of what it was.
    """

    what: str


Known = Mesh | tuple[Mesh, str | Sequence[str]] | Group | Replicated | Placement
PlacementSource = Known | Callable[[], Known]
"""A value of the argument ``placement``; the docstring of this module lists them."""


def find_placement(said: PlacementSource | None = None) -> Placement:
    """Find the placement of this process.

    Args:
        said: value of the argument ``placement``; None for the ranks that the environment knows,
            each of which takes other samples.

    Raises:
        UsageError: it is ambiguous or none of what ``placement`` takes, this process is no member
            of the mesh or group, the ranks cannot be divided into groups, or the environment says
            that there are several ranks, but not which is this one.
    """
    check_said(said)
    if said is None:
        return placement_of_environment()
    if isinstance(said, Placement):
        given = check_placement(said.rank, said.world_size, "placement")
        return replace(given, is_launched=is_launched())
    if isinstance(said, Replicated):
        return _divide(placement_of_environment(), said.ranks)
    if isinstance(said, tuple):
        return _place_in_mesh(*said)
    if _is_mesh(said):
        return _place_in_mesh(said, None)
    if _is_group(said):
        return Placement(said.rank(), said.size(), is_launched=said.size() > 1)
    return find_placement(_call(said))


def begin_placement(said: PlacementSource | None) -> Placement:
    """Find the placement of this process for an epoch that begins.

    Raises:
        UsageError: as ``find_placement``; or nothing was said, and PyTorch has a mesh whose ranks
            may need the same samples.
    """
    found = find_placement(said)
    if said is None:
        check_meshes(found)
    return found


def check_same_placement(
    said: PlacementSource | None, began: Placement, what: str, remedy: str
) -> None:
    """Check that the placement of this process is the one with which an epoch began.

    Args:
        said: value of the argument ``placement``.
        began: placement that was found then.
        what: what began, for error messages.
        remedy: what to call to go on with the placement of now.

    Raises:
        UsageError: it is another one, or cannot be found.
    """
    now = find_placement(said)
    if now != began:
        raise UsageError(
            f"take the next batch: expected {began}, with which {what} began, got {now}: ranks "
            "or their mesh were made since; make the object and begin in the processes of the "
            f"ranks, or {remedy} to go on at this position with the ranks of now"
        )


def check_said(said: object) -> None:
    """Check what is known of a ``placement`` before an epoch begins.

    Raises:
        UsageError: it is none of what ``placement`` takes, or a mesh whose data dimensions are not
            known.
    """
    if said is None or isinstance(said, Placement | Replicated):
        return
    if isinstance(said, Detached):
        raise UsageError(
            f"{_ACTION}: {said.what} belongs to the process that made it, and this object was "
            "pickled into another one; give a function that can be pickled and returns it here"
        )
    if isinstance(said, tuple) and len(said) == 2 and _is_mesh(said[0]):
        _data_dimensions(*said)
    elif _is_mesh(said):
        _data_dimensions(said, None)
    elif isinstance(said, int) and said == _NO_MEMBER:
        raise UsageError(
            f"{_ACTION}: expected a process group of this rank, got one that it is no member of "
            "(GroupMember.NON_GROUP_MEMBER)"
        )
    elif not (_is_group(said) or callable(said)):
        raise UsageError(f"{_ACTION}: {_EXPECTED}, got {show_value(said)}")


def check_one_source(rank: object, world_size: object, said: object) -> None:
    """Check that ranks are said in one way.

    Raises:
        UsageError: there are numbers and a placement.
    """
    if said is not None and not (rank is None and world_size is None):
        raise UsageError(
            f"{_ACTION}: expected placement or the numbers of ranks, got placement with rank "
            f"{rank} and world size {world_size}"
        )


def detach(said: PlacementSource | None) -> Any:
    """Return what an object with a ``placement`` is pickled with in its place."""
    if said is None or isinstance(said, Placement | Replicated | Detached):
        return said
    if isinstance(said, tuple) or _is_mesh(said):
        return Detached("a DeviceMesh")
    if _is_group(said):
        return Detached("a process group")
    try:
        pickle.dumps(said)
    except Exception:  # noqa: BLE001 - of any type, as what the function refers to raises it
        return Detached("a function")
    return said


def _is_mesh(said: object) -> TypeGuard[Mesh]:
    return hasattr(said, "get_coordinate") and hasattr(said, "mesh_dim_names")


def _is_group(said: object) -> TypeGuard[Group]:
    return callable(getattr(said, "rank", None)) and callable(getattr(said, "size", None))


def _call(said: Any) -> Any:
    """Return what a function returns.

    Raises:
        UsageError: it raised, or returned nothing or another function.
    """
    try:
        found = said()
    except Exception as error:
        raise UsageError(
            f"{_ACTION}: expected that the function of placement returns a mesh, group or "
            f"numbers, got {type(error).__name__}: {error}"
        ) from error
    if found is None or (not (_is_mesh(found) or _is_group(found)) and callable(found)):
        raise UsageError(f"{_ACTION}: {_EXPECTED}, got a function that returns {show_value(found)}")
    return found


def _divide(found: Placement, ranks: int) -> Placement:
    """Return the placement of a group of consecutive ranks."""
    groups, left = divmod(found.world_size, ranks)
    if left:
        raise UsageError(
            f"{_ACTION}: expected a number of ranks that Replicated({ranks}) divides, got "
            f"{found.world_size}"
        )
    return Placement(found.rank // ranks, groups, is_launched=found.is_launched)


def _place_in_mesh(mesh: Mesh, names: str | Sequence[str] | None) -> Placement:
    """Return the placement along the data dimensions of a mesh, the last of which varies fastest.

    Raises:
        UsageError: this rank is no member of the mesh.
    """
    dimensions = _data_dimensions(mesh, names)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(
            f"{_ACTION}: expected a mesh of which this rank is a member, got {show_value(mesh)}"
        )
    rank, size = 0, 1
    for at in dimensions:
        rank = rank * mesh.size(at) + coordinate[at]
        size *= mesh.size(at)
    return Placement(rank, size, is_launched=size > 1)


def _data_dimensions(mesh: Mesh, names: str | Sequence[str] | None) -> list[int]:
    """Return the data dimensions of a mesh, in its order.

    Args:
        mesh: the mesh.
        names: their names; None for the only dimension.

    Raises:
        UsageError: there are no names, and several dimensions or one that is not of data; or the
            mesh has not these names.
    """
    known = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim == 1:
            _check_only_dimension(mesh)
            return [0]
        got = "without names" if known is None else join_words(known, "and")
        raise UsageError(
            f"{_ACTION}: expected the names of the mesh's data dimensions, whose ranks take "
            f"different samples, got a mesh of {mesh.ndim} dimensions, {got}; give "
            'placement=(mesh, "dp"), or (mesh, ["dp_replicate", "dp_shard"])'
        )
    wanted = [names] if isinstance(names, str) else list(names)
    if known is None or len({*wanted}) < len(wanted) or not {*wanted} <= {*known}:
        got = "without names" if known is None else f"with {join_words(known, 'and')}"
        raise UsageError(
            f"{_ACTION}: expected different names of dimensions of the mesh, got "
            f"{show_value(names)} for one {got}"
        )
    return [at for at, name in enumerate(known) if name in wanted]


def _check_only_dimension(mesh: Mesh) -> None:
    """Refuse ``mesh["tp"]``, whose ranks would get different samples, unless it is named.

    Raises:
        UsageError: the name of the dimension is none of a data dimension.
    """
    name = (mesh.mesh_dim_names or ("dp",))[0]
    is_of_data = name.startswith(_DATA_DIMENSIONS) and _MODEL_DIMENSIONS.isdisjoint(name.split("_"))
    if mesh.size(0) > 1 and not is_of_data:
        raise UsageError(
            f'{_ACTION}: expected a mesh of a data dimension, such as mesh["dp"], whose ranks '
            f"take different samples, got one of {name!r}; give placement=(mesh, {name!r}) if its "
            "ranks do, or placement=(mesh, []) if all its ranks read the same"
        )


def check_meshes(found: Placement) -> None:
    """Refuse to give different samples to ranks of a mesh that may need the same ones.

    Args:
        found: placement of this process among all ranks, of which the caller said nothing.

    Raises:
        UsageError: this process has a mesh with other than data dimensions.
    """
    if found.world_size == 1 or process_group() is None:
        return
    others = sorted(set(_other_dimensions()))
    if others:
        raise UsageError(
            f"{_ACTION}: expected placement, as a DeviceMesh has the dimensions "
            f"{join_words(others, 'and')}: ranks of tensor, pipeline or context parallelism need "
            f'the same samples; give placement=mesh["dp"], with the name of the data dimension, '
            "or placement=torch.distributed.group.WORLD if each rank takes other samples; got "
            f"none in {found}"
        )


def _other_dimensions() -> list[str]:
    """Return the dimensions of this process's meshes whose ranks may need the same samples.

    PyTorch keeps no list of meshes; the garbage collector knows them.
    """
    kind = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    found: list[str] = []
    for mesh in [one for one in gc.get_objects() if type(one) is kind]:
        names = mesh.mesh_dim_names or ["dp", *["without a name"] * (mesh.ndim - 1)]
        sizes = zip(names, mesh.shape, strict=True)
        found += [n for n, size in sizes if size > 1 and not n.startswith(_DATA_DIMENSIONS)]
    return found
