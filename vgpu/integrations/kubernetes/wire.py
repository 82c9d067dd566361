"""The kubelet's gRPC services, from ``protos/kubelet.binpb``: the descriptors of ``protos/*.proto``, which ``protoc``
wrote (tests/cluster/kubernetes/protos.py). So an installation needs no compiler and no generated module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from vgpu.errors import VgpuError

DESCRIPTORS: Final = Path(__file__).parent / "protos" / "kubelet.binpb"
REGISTRATION: Final = "pluginregistration.Registration"
DRA: Final = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
DRA_HEALTH: Final = "v1.DRAResourceHealth"
PLUGIN_REGISTRATION: Final = "v1beta1.Registration"
PLUGIN: Final = "v1beta1.DevicePlugin"
POD_RESOURCES: Final = "v1.PodResourcesLister"
LONGEST_SOCKET: Final = 107
"""Bytes in the path of a Unix socket."""


def _loaded() -> descriptor_pool.DescriptorPool:
    """A pool of its own: other packages of this process may have the kubelet's messages under the same names."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        pool.Add(file)
    return pool


_POOL: Final = _loaded()


def message(name: str) -> Any:
    """The class of a message, by its full name such as ``v1beta1.Device``."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


def handlers(service: str, methods: Mapping[str, Callable[..., Any]]) -> grpc.GenericRpcHandler:
    """What a server answers. A method of the service takes a request and returns the answer; a ``VgpuError`` fails the
    call. A method that yields several answers also takes a function that says whether the caller is still there."""
    return grpc.method_handlers_generic_handler(
        service,
        {
            method.name: _handler(method, methods[method.name])
            for method in _POOL.FindServiceByName(service).methods
            if method.name in methods
        },
    )


def _handler(method: Any, answer: Callable[..., Any]) -> grpc.RpcMethodHandler:
    def once(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return answer(request)
        except VgpuError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def several(request: Any, context: grpc.ServicerContext) -> Any:
        return answer(request, context.is_active)

    streams = method.server_streaming
    made = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    return made(
        several if streams else once,
        request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
        response_serializer=lambda reply: reply.SerializeToString(),
    )


class Client:
    """Calls methods of one service at a Unix socket: ``client.List(request)``."""

    def __init__(self, service: str, path: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{path}")
        for method in _POOL.FindServiceByName(service).methods:
            kind = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
            call = kind(
                f"/{service}/{method.name}",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"the service has no method {name}")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
