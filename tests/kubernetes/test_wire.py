"""The table of messages against the published definition, where DLFS_CSI_PROTO names it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dlfs_csi import wire
from dlfs_csi.wire import SERVICES, TABLE, messages

# python -m grpc_tools.protoc -I . --include_imports --descriptor_set_out=FILE csi.proto
PUBLISHED = os.environ.get("DLFS_CSI_PROTO", "")


def test_every_field_has_a_number_of_its_own() -> None:
    for name, fields in TABLE.items():
        numbers = [field.split()[2] for field in fields.split(",") if field]
        assert len(set(numbers)) == len(numbers), name


def test_messages_keep_their_fields() -> None:
    made = messages.NodePublishVolumeRequest(volume_id="v", secrets={"k": "s"}, readonly=True)
    made.volume_capability.mount.mount_flags.append("ro")
    assert made.SerializeToString(deterministic=True) == bytes.fromhex(
        "0a0176" "2a06" "12041202726f" "3001" "3a06" "0a016b120173"
    )  # fmt: skip
    unknown = b"\x92\x01\x01x"  # field 18, which this driver does not know
    found = messages.NodePublishVolumeRequest.FromString(made.SerializeToString() + unknown)
    assert (found.volume_id, dict(found.secrets), found.readonly) == ("v", {"k": "s"}, True)


@pytest.mark.skipif(not PUBLISHED, reason="no csi.proto here: DLFS_CSI_PROTO names its descriptors")
def test_the_table_is_a_part_of_the_published_definition() -> None:
    from google.protobuf import descriptor_pb2, descriptor_pool

    pool = descriptor_pool.DescriptorPool()
    with open(PUBLISHED, "rb") as file:
        for each in descriptor_pb2.FileDescriptorSet.FromString(file.read()).file:
            pool.Add(each)
    for service, methods in SERVICES.items():
        known = pool.FindServiceByName(f"csi.v1.{service}").methods_by_name
        for method in methods:
            for ours, theirs in (
                (f"{method}Request", known[method].input_type),
                (f"{method}Response", known[method].output_type),
            ):
                _compare(getattr(messages, ours).DESCRIPTOR, theirs)
    for enum, name in (
        (wire.Mode, "VolumeCapability.AccessMode.Mode"),
        (wire.PluginServiceType, "PluginCapability.Service.Type"),
        (wire.ExpansionType, "PluginCapability.VolumeExpansion.Type"),
        (wire.NodeRpc, "NodeServiceCapability.RPC.Type"),
        (wire.ControllerRpc, "ControllerServiceCapability.RPC.Type"),
        (wire.Unit, "VolumeUsage.Unit"),
    ):
        published = pool.FindEnumTypeByName(f"csi.v1.{name}").values_by_name
        for each in enum:
            assert published[each.name].number == each


def _compare(ours: Any, theirs: Any) -> None:
    for field in ours.fields:
        other = theirs.fields_by_name[field.name]
        kinds = {other.TYPE_ENUM: field.TYPE_INT32}
        assert field.number == other.number, field.full_name
        assert field.type == kinds.get(other.type, other.type), field.full_name
        assert field.is_repeated == other.is_repeated, field.full_name
        if field.message_type is not None and field.message_type.name != "Anything":
            _compare(field.message_type, other.message_type)
