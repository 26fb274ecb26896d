"""Answers calls of the Container Storage Interface on a Unix socket, by gRPC.

Each call runs in a thread of a pool. A thread of its own looks after what is published (``Watch``).
A call fails with the code and message of its ``CallError``; a message has no key, whatever a server
has printed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

import grpc

from dlfs_csi import DRIVER_NAME, VERSION
from dlfs_csi.controller import Controller, Found
from dlfs_csi.failures import CallError, Code
from dlfs_csi.keys import Redactor
from dlfs_csi.mounts import State
from dlfs_csi.node import Node
from dlfs_csi.wire import (
    PACKAGE,
    SERVICES,
    ControllerRpc,
    ExpansionType,
    NodeRpc,
    PluginServiceType,
    Unit,
    messages,
)

CALLS_MAX = 64
"""Most calls at a time; more wait."""
_NO_DEADLINE_SECONDS = 365 * 86400.0
LOOK_SECONDS = 1.0
"""Time between two looks at what is published, in seconds."""

_log = logging.getLogger(__name__)
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Call(Protocol):
    """The part of gRPC's context of a call that is used here."""

    def time_remaining(self) -> float | None:
        """Return the time until its deadline, in seconds; None if it has none."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End it with an error."""


class Identity:
    """The identity service.

    Args:
        node: the node service of this driver; None if it has none.
        controller: its controller service; None if it has none.
    """

    def __init__(self, node: Node | None, controller: Controller | None) -> None:
        self._node = node
        self._controller = controller

    def get_plugin_info(self, _request: Any, _call: Call) -> Any:
        return messages.GetPluginInfoResponse(name=DRIVER_NAME, vendor_version=VERSION)

    def get_plugin_capabilities(self, _request: Any, _call: Call) -> Any:
        response = messages.GetPluginCapabilitiesResponse()
        if self._controller is not None:
            response.capabilities.add().service.type = PluginServiceType.CONTROLLER_SERVICE
            response.capabilities.add().volume_expansion.type = ExpansionType.ONLINE
        return response

    def probe(self, _request: Any, _call: Call) -> Any:
        for part in (self._node, self._controller):
            if part is not None:
                part.check_ready()
        return messages.ProbeResponse(ready=messages.BoolValue(value=True))


class NodeService:
    """The node service: translates messages.

    Args:
        node: what does it.
        node_id: name of this node.
        redactor: removes keys from messages.
    """

    def __init__(self, node: Node, node_id: str, redactor: Redactor) -> None:
        self._node = node
        self._node_id = node_id
        self._redactor = redactor

    def node_publish_volume(self, request: Any, call: Call) -> Any:
        with self._redactor.hiding(dict(request.secrets)):
            try:
                self._node.publish(request, _seconds_left(call))
            except CallError as error:
                raise CallError(error.code, self._redactor.clean(str(error))) from None
        return messages.NodePublishVolumeResponse()

    def node_unpublish_volume(self, request: Any, _call: Call) -> Any:
        self._node.unpublish(request)
        return messages.NodeUnpublishVolumeResponse()

    def node_get_volume_stats(self, request: Any, _call: Call) -> Any:
        answer, problem = self._node.statistics(request.volume_id, request.volume_path)
        response = messages.NodeGetVolumeStatsResponse()
        response.volume_condition.abnormal = answer.state is not State.ANSWERS
        response.volume_condition.message = problem or "it answers"
        if answer.space is not None:
            space = answer.space
            block = space.f_frsize
            response.usage.add(
                unit=Unit.BYTES,
                total=space.f_blocks * block,
                available=space.f_bavail * block,
                used=(space.f_blocks - space.f_bfree) * block,
            )
            response.usage.add(
                unit=Unit.INODES,
                total=space.f_files,
                available=space.f_ffree,
                used=space.f_files - space.f_ffree,
            )
        return response

    def node_get_capabilities(self, _request: Any, _call: Call) -> Any:
        response = messages.NodeGetCapabilitiesResponse()
        for kind in NodeRpc:
            response.capabilities.add().rpc.type = kind
        return response

    def node_get_info(self, _request: Any, _call: Call) -> Any:
        return messages.NodeGetInfoResponse(
            node_id=self._node_id, max_volumes_per_node=self._node.volumes_max
        )


def _seconds_left(call: Call) -> float | None:
    """Return the time that a call has left, in seconds; None if it has no deadline."""
    left_s = call.time_remaining()  # without a deadline, gRPC gives the time until a far year
    return None if left_s is None or left_s > _NO_DEADLINE_SECONDS else left_s


class ControllerService:
    """The controller service: translates messages.

    Args:
        controller: what does it.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def create_volume(self, request: Any, _call: Call) -> Any:
        return messages.CreateVolumeResponse(volume=_volume(self._controller.create(request)))

    def delete_volume(self, request: Any, _call: Call) -> Any:
        self._controller.delete(request.volume_id)
        return messages.DeleteVolumeResponse()

    def validate_volume_capabilities(self, request: Any, _call: Call) -> Any:
        problem = self._controller.validate(request)
        response = messages.ValidateVolumeCapabilitiesResponse(message=problem)
        if not problem:
            response.confirmed.volume_capabilities.extend(request.volume_capabilities)
            response.confirmed.volume_context.update(request.volume_context)
            response.confirmed.parameters.update(request.parameters)
        return response

    def list_volumes(self, request: Any, _call: Call) -> Any:
        found, token = self._controller.list(request.max_entries, request.starting_token)
        response = messages.ListVolumesResponse(next_token=token)
        for each in found:
            response.entries.add().volume.CopyFrom(_volume(each))
        return response

    def controller_get_capabilities(self, _request: Any, _call: Call) -> Any:
        response = messages.ControllerGetCapabilitiesResponse()
        for kind in ControllerRpc:
            response.capabilities.add().rpc.type = kind
        return response

    def controller_expand_volume(self, request: Any, _call: Call) -> Any:
        size_bytes = self._controller.expand(request)
        return messages.ControllerExpandVolumeResponse(capacity_bytes=size_bytes)


def _volume(found: Found) -> Any:
    return messages.Volume(
        volume_id=found.volume_id,
        capacity_bytes=found.capacity_bytes,
        volume_context=found.attributes,
    )


class Watch:
    """Looks after what is published, from its start to its stop.

    Args:
        node: whose volumes.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._problem = ""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, once the look under way is over."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Look once."""
        problem = ""
        try:
            self._node.look_after()
        except CallError as error:
            problem = str(error)
        except Exception:  # noqa: BLE001  the next look may succeed
            _log.exception("looking after the volumes failed by a defect")
        if problem and problem != self._problem:
            _log.error("%s; trying again", problem)
        self._problem = problem


def _handler(serve: Callable[[Any, Call], Any], method: str) -> Any:
    """Return gRPC's handler of a method."""

    def answer(request: Any, call: Call) -> Any:
        try:
            return serve(request, call)
        except CallError as error:
            failure = error
        except Exception:  # noqa: BLE001  the other calls go on
            _log.exception("%s failed by a defect", method)
            failure = CallError(Code.INTERNAL, f"{method}: a defect of the driver; see its log")
        return _fail(call, method, failure)

    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=getattr(messages, f"{method}Request").FromString,
        response_serializer=getattr(messages, f"{method}Response").SerializeToString,
    )


def _fail(call: Call, method: str, failure: CallError) -> NoReturn:
    if failure.code not in (Code.NOT_FOUND, Code.ABORTED):
        _log.error("%s: %s: %s", method, failure.code.name, failure)
    call.abort(_CODES[int(failure.code)], str(failure))


def _snake(method: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in method).lstrip("_")


def make_server(path: str, services: dict[str, object]) -> Any:
    """Return a gRPC server on a Unix socket, in place of one that an earlier process has left.

    Args:
        path: path of the socket; only its owner may connect. No other thread may make files
            meanwhile, since they would get the socket's permissions.
        services: the services, by their names in ``wire.SERVICES``.

    Raises:
        OSError: the socket cannot be made.
    """
    pool = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="call")
    server = grpc.server(pool)
    handlers = [
        grpc.method_handlers_generic_handler(
            f"{PACKAGE}.{name}",
            {
                method: _handler(getattr(service, _snake(method)), method)
                for method in SERVICES[name]
            },
        )
        for name, service in services.items()
    ]
    server.add_generic_rpc_handlers(tuple(handlers))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    finally:
        os.umask(before)
    return server
