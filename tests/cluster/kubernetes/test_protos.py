"""The kubelet's messages on the wire. The bytes were worked out by hand, from the numbers of the fields in the proto
files of Kubernetes: 0a is field 1 with a text or message, 12 field 2, 1a field 3, 22 field 4, 2a field 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kubernetes.cluster import PACKAGE
from tests.cluster.kubernetes.protos import compiled
from vgpu.integrations.kubernetes import wire

BYTES: list[tuple[str, dict[str, Any], str]] = [
    (
        "pluginregistration.PluginInfo",
        {"type": "t", "name": "n", "endpoint": "e", "supported_versions": ["v"]},
        "0a0174 12016e 1a0165 220176",
    ),
    ("pluginregistration.RegistrationStatus", {"plugin_registered": True, "error": "e"}, "0801 120165"),
    (f"{PACKAGE}.Claim", {"namespace": "n", "uid": "u", "name": "c"}, "0a016e 120175 1a0163"),
    (
        f"{PACKAGE}.NodePrepareResourcesRequest",
        {"claims": [{"namespace": "n", "uid": "u", "name": "c"}]},
        "0a09 0a016e 120175 1a0163",
    ),
    (
        f"{PACKAGE}.NodePrepareResourcesResponse",
        {
            "claims": {
                "u": {
                    "devices": [
                        {
                            "request_names": ["r"],
                            "pool_name": "p",
                            "device_name": "d",
                            "cdi_device_ids": ["c"],
                            "share_id": "s",
                        }
                    ],
                    "error": "e",
                }
            }
        },
        "0a19 0a0175 1214 0a0f 0a0172 120170 1a0164 220163 2a0173 120165",
    ),
    (f"{PACKAGE}.NodeUnprepareResourcesResponse", {"claims": {"u": {"error": "e"}}}, "0a08 0a0175 1203 0a0165"),
    (
        "v1.NodeWatchResourcesResponse",
        {
            "devices": [
                {
                    "device": {"pool_name": "p", "device_name": "d"},
                    "health": "UNHEALTHY",
                    "last_updated_time": 3,
                    "health_check_timeout_seconds": 4,
                    "message": "m",
                }
            ]
        },
        "0a11 0a06 0a0170 120164 1002 1803 2004 2a016d",
    ),
    (
        "v1beta1.DevicePluginOptions",
        {"pre_start_required": True, "get_preferred_allocation_available": True},
        "0801 1001",
    ),
    (
        "v1beta1.RegisterRequest",
        {
            "version": "v",
            "endpoint": "e",
            "resource_name": "r",
            "options": {"get_preferred_allocation_available": True},
        },
        "0a0176 120165 1a0172 2202 1001",
    ),
    ("v1beta1.ListAndWatchResponse", {"devices": [{"ID": "i", "health": "h"}]}, "0a06 0a0169 120168"),
    (
        "v1beta1.PreferredAllocationRequest",
        {"container_requests": [{"available_deviceIDs": ["a"], "must_include_deviceIDs": ["m"], "allocation_size": 2}]},
        "0a08 0a0161 12016d 1802",
    ),
    ("v1beta1.PreferredAllocationResponse", {"container_responses": [{"deviceIDs": ["a"]}]}, "0a03 0a0161"),
    ("v1beta1.AllocateRequest", {"container_requests": [{"devices_ids": ["a"]}]}, "0a03 0a0161"),
    (
        "v1beta1.AllocateResponse",
        {"container_responses": [{"cdi_devices": [{"name": "c"}]}]},
        "0a05 2a03 0a0163",
    ),
    (
        "v1.ListPodResourcesResponse",
        {
            "pod_resources": [
                {
                    "name": "p",
                    "namespace": "n",
                    "containers": [
                        {
                            "name": "c",
                            "devices": [{"resource_name": "r", "device_ids": ["i"]}],
                            "dynamic_resources": [
                                {
                                    "claim_name": "c",
                                    "claim_namespace": "n",
                                    "claim_resources": [{"cdi_devices": [{"name": "d"}], "driver_name": "v"}],
                                }
                            ],
                        }
                    ],
                }
            ]
        },
        "0a25 0a0170 12016e 1a1d 0a0163 1206 0a0172 120169 2a10 120163 1a016e 2208 0a03 0a0164 120176",
    ),
]


@pytest.mark.parametrize(("name", "fields", "expected"), BYTES, ids=[name for name, _, _ in BYTES])
def test_the_bytes_of_a_message(name: str, fields: dict[str, Any], expected: str) -> None:
    made = wire.message(name)(**fields)
    assert made.SerializeToString().hex(" ") == bytes.fromhex(expected).hex(" ")
    assert wire.message(name).FromString(bytes.fromhex(expected)) == made


def test_the_descriptors_are_those_of_the_proto_files(tmp_path: Path) -> None:
    assert compiled(tmp_path) == wire.DESCRIPTORS.read_bytes(), "python -P -m tests.cluster.kubernetes.protos"
