"""The rpcs of vLLM's services as callables, derived from the descriptors of the committed protos.

No generated gRPC code is involved: it would tie the installed grpcio to its generator's version.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from rollplane.engines.grpc.proto import control_pb2, inference_pb2

INFERENCE: Final[ServiceDescriptor] = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
CONTROL: Final[ServiceDescriptor] = control_pb2.DESCRIPTOR.services_by_name["Control"]

DATA_PARALLEL_RANK: Final = "x-data-parallel-rank"
"""Metadata key of the data-parallel rank that was chosen for a request."""


class Stub:
    """One service on one channel: every rpc is an attribute by its name.

    Args:
        parse: makes an answer of its bytes, in place of the class that the service names.
    """

    def __init__(
        self, channel: grpc.aio.Channel, service: ServiceDescriptor, *, parse: Callable[[bytes], Any] | None = None
    ) -> None:
        self._service = service.full_name
        for method in service.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            read = parse or _message_class(method.output_type).FromString
            setattr(self, method.name, make(method_path(method), _serialize, read))

    def __repr__(self) -> str:
        return f"<Stub {self._service}>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._service} has no rpc {name}")


def method_path(method: MethodDescriptor) -> str:
    """`/package.Service/Method`."""
    return f"/{method.containing_service.full_name}/{method.name}"


def service_handler(service: ServiceDescriptor, methods: Mapping[str, Callable[..., Any]]) -> grpc.GenericRpcHandler:
    """A server's handler; rpcs without an entry in `methods` answer UNIMPLEMENTED."""
    handlers = {}
    for method in service.methods:
        if method.name in methods:
            make = (
                grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
            )
            handlers[method.name] = make(
                methods[method.name],
                request_deserializer=_message_class(method.input_type).FromString,
                response_serializer=_serialize,
            )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _message_class(descriptor: Any) -> Any:
    return message_factory.GetMessageClass(descriptor)
