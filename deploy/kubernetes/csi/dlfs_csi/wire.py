"""The messages and services of the Container Storage Interface, version 1, that this driver uses.

protobuf and gRPC put field numbers and types on the wire, and no names. So the table below, which
has the numbers and types of the fields that are read or written here, is all that a peer with the
published definition needs: fields that it lacks are skipped. No distribution and no Python package
has the definition, so nothing is generated from it. A test compares the table with the definition
where that is at hand.

Message classes are attributes of ``messages``; enumerations are integers on the wire, and
``IntEnum`` here.

Source: Container Storage Interface, csi.proto of version 1.12.
"""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

PACKAGE = "csi.v1"

TABLE = {
    "BoolValue": "value bool 1",  # as google.protobuf.BoolValue
    "Topology": "segments map 1",
    "TopologyRequirement": "requisite [Topology] 1, preferred [Topology] 2",
    "CapacityRange": "required_bytes int64 1, limit_bytes int64 2",
    "VolumeContentSource": "snapshot Anything 1, volume Anything 2",
    "Anything": "",
    "MountVolume": "fs_type string 1, mount_flags [string] 2, volume_mount_group string 3",
    "AccessMode": "mode int32 1",
    "VolumeCapability": "block Anything 1, mount MountVolume 2, access_mode AccessMode 3",
    "Volume": (
        "capacity_bytes int64 1, volume_id string 2, volume_context map 3,"
        " content_source VolumeContentSource 4, accessible_topology [Topology] 5"
    ),
    "VolumeCondition": "abnormal bool 1, message string 2",
    "VolumeUsage": "available int64 1, total int64 2, used int64 3, unit int32 4",
    # ---- identity
    "GetPluginInfoRequest": "",
    "GetPluginInfoResponse": "name string 1, vendor_version string 2, manifest map 3",
    "PluginService": "type int32 1",
    "VolumeExpansion": "type int32 1",
    "PluginCapability": "service PluginService 1, volume_expansion VolumeExpansion 2",
    "GetPluginCapabilitiesRequest": "",
    "GetPluginCapabilitiesResponse": "capabilities [PluginCapability] 1",
    "ProbeRequest": "",
    "ProbeResponse": "ready BoolValue 1",
    # ---- node
    "NodePublishVolumeRequest": (
        "volume_id string 1, publish_context map 2, staging_target_path string 3,"
        " target_path string 4, volume_capability VolumeCapability 5, readonly bool 6,"
        " secrets map 7, volume_context map 8"
    ),
    "NodePublishVolumeResponse": "",
    "NodeUnpublishVolumeRequest": "volume_id string 1, target_path string 2",
    "NodeUnpublishVolumeResponse": "",
    "NodeGetVolumeStatsRequest": (
        "volume_id string 1, volume_path string 2, staging_target_path string 3"
    ),
    "NodeGetVolumeStatsResponse": "usage [VolumeUsage] 1, volume_condition VolumeCondition 2",
    "Rpc": "type int32 1",
    "ServiceCapability": "rpc Rpc 1",
    "NodeGetCapabilitiesRequest": "",
    "NodeGetCapabilitiesResponse": "capabilities [ServiceCapability] 1",
    "NodeGetInfoRequest": "",
    "NodeGetInfoResponse": (
        "node_id string 1, max_volumes_per_node int64 2, accessible_topology Topology 3"
    ),
    # ---- controller
    "CreateVolumeRequest": (
        "name string 1, capacity_range CapacityRange 2,"
        " volume_capabilities [VolumeCapability] 3, parameters map 4, secrets map 5,"
        " volume_content_source VolumeContentSource 6,"
        " accessibility_requirements TopologyRequirement 7, mutable_parameters map 8"
    ),
    "CreateVolumeResponse": "volume Volume 1",
    "DeleteVolumeRequest": "volume_id string 1, secrets map 2",
    "DeleteVolumeResponse": "",
    "Confirmed": "volume_context map 1, volume_capabilities [VolumeCapability] 2, parameters map 3",
    "ValidateVolumeCapabilitiesRequest": (
        "volume_id string 1, volume_context map 2, volume_capabilities [VolumeCapability] 3,"
        " parameters map 4, secrets map 5"
    ),
    "ValidateVolumeCapabilitiesResponse": "confirmed Confirmed 1, message string 2",
    "ListVolumesRequest": "max_entries int32 1, starting_token string 2",
    "ListedVolume": "volume Volume 1",
    "ListVolumesResponse": "entries [ListedVolume] 1, next_token string 2",
    "ControllerGetCapabilitiesRequest": "",
    "ControllerGetCapabilitiesResponse": "capabilities [ServiceCapability] 1",
    "ControllerExpandVolumeRequest": (
        "volume_id string 1, capacity_range CapacityRange 2, secrets map 3,"
        " volume_capability VolumeCapability 4"
    ),
    "ControllerExpandVolumeResponse": "capacity_bytes int64 1, node_expansion_required bool 2",
}
"""Fields of each message: name, type and number. ``map`` is from string to string."""

SERVICES = {
    "Identity": ("GetPluginInfo", "GetPluginCapabilities", "Probe"),
    "Node": (
        "NodePublishVolume", "NodeUnpublishVolume", "NodeGetVolumeStats", "NodeGetCapabilities",
        "NodeGetInfo",
    ),
    "Controller": (
        "CreateVolume", "DeleteVolume", "ValidateVolumeCapabilities", "ListVolumes",
        "ControllerGetCapabilities", "ControllerExpandVolume",
    ),
}  # fmt: skip
"""Methods of each service; method X takes an XRequest and returns an XResponse."""


class Mode(IntEnum):
    """VolumeCapability.AccessMode.Mode."""

    UNKNOWN = 0
    SINGLE_NODE_WRITER = 1
    SINGLE_NODE_READER_ONLY = 2
    MULTI_NODE_READER_ONLY = 3
    MULTI_NODE_SINGLE_WRITER = 4
    MULTI_NODE_MULTI_WRITER = 5
    SINGLE_NODE_SINGLE_WRITER = 6
    SINGLE_NODE_MULTI_WRITER = 7


class PluginServiceType(IntEnum):
    """PluginCapability.Service.Type."""

    CONTROLLER_SERVICE = 1


class ExpansionType(IntEnum):
    """PluginCapability.VolumeExpansion.Type."""

    ONLINE = 1


class NodeRpc(IntEnum):
    """NodeServiceCapability.RPC.Type."""

    GET_VOLUME_STATS = 2
    VOLUME_CONDITION = 4


class ControllerRpc(IntEnum):
    """ControllerServiceCapability.RPC.Type."""

    CREATE_DELETE_VOLUME = 1
    LIST_VOLUMES = 3
    EXPAND_VOLUME = 9


class Unit(IntEnum):
    """VolumeUsage.Unit."""

    BYTES = 1
    INODES = 2


_SCALARS = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
}


def _add_field(message: Any, name: str, kind: str, number: int) -> None:
    field = message.field.add(name=name, number=number)
    field.label = FieldDescriptorProto.LABEL_OPTIONAL
    if kind.startswith("["):
        field.label = FieldDescriptorProto.LABEL_REPEATED
        kind = kind[1:-1]
    if kind == "map":
        entry_name = "".join(word.capitalize() for word in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, "key", "string", 1)
        _add_field(entry, "value", "string", 2)
        field.label = FieldDescriptorProto.LABEL_REPEATED
        kind = f"{message.name}.{entry_name}"
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


def _make_messages() -> Any:
    file = FileDescriptorProto(name="dlfs_csi", package=PACKAGE, syntax="proto3")
    for name, fields in TABLE.items():
        message: DescriptorProto = file.message_type.add(name=name)
        for field in filter(None, fields.split(",")):
            field_name, kind, number = field.split()
            _add_field(message, field_name, kind, int(number))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in TABLE
    }
    return SimpleNamespace(**classes)


messages: Any = _make_messages()
"""The classes of the messages, by name."""
