"""A picker that decides nothing: the lower bound of every picker on its transport. `picker_overhead.py` runs it.

    python bench/routing/minimal_picker.py 9002 127.0.0.1:8001          # on grpc.aio
    python bench/routing/minimal_picker.py 9002 127.0.0.1:8001 floor    # on the router's own transport

The second sends constants that were written before, so what it adds is Envoy's filter and two round trips of a process.
"""

from __future__ import annotations

import asyncio
import sys

import grpc
import grpc.aio
import uvloop

from moestro.gateway.picker import ext_proc_pb2 as ext_proc
from moestro.gateway.picker import messages
from moestro.gateway.picker.grpc_connection import GrpcConnection
from moestro.web.ports.faults import Faults, Port, PortFaults

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"


def piece(body: ext_proc.HttpBody) -> ext_proc.BodyResponse:
    streamed = ext_proc.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    mutation = ext_proc.BodyMutation(streamed_response=streamed)
    return ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=mutation))


def destination(endpoint: str) -> ext_proc.ProcessingResponse:
    header = ext_proc.HeaderValueOption(header=ext_proc.HeaderValue(key=DESTINATION, raw_value=endpoint.encode()))
    mutation = ext_proc.HeaderMutation(set_headers=[header])
    common = ext_proc.CommonResponse(header_mutation=mutation)
    response = ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse(response=common))
    response.dynamic_metadata.update({"envoy.lb": {DESTINATION: endpoint}})
    return response


async def main(port: int, endpoint: str) -> None:
    async def process(requests, context):
        async for message in requests:
            kind = message.WhichOneof("request")
            if kind == "request_headers":
                yield destination(endpoint)
            elif kind == "response_headers":
                yield ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse())
            else:
                yield ext_proc.ProcessingResponse(**{kind: piece(getattr(message, kind))})

    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=ext_proc.ProcessingRequest.FromString,
        response_serializer=ext_proc.ProcessingResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


class Slot:
    """A place of a connection at a port that has no bounds."""

    def begins(self) -> None:
        pass

    def ends(self) -> None:
        pass

    def release(self) -> None:
        pass


class Constants:
    """Answers the messages of one request, whose kinds are the first byte of each: the number of its first field."""

    destination = b""
    head = messages.answer_headers([], ())

    def __init__(self, call) -> None:
        self.call = call

    def message(self, data: bytes) -> None:
        kind = data[0] >> 3
        if kind == 2:
            self.call.send(self.destination)
        elif kind == 3:
            self.call.send(self.head)
        else:
            message = ext_proc.ProcessingRequest.FromString(data)
            name = message.WhichOneof("request")
            body, write = getattr(message, name), messages.request_piece if kind == 4 else messages.response_piece
            self.call.send(write(body.body, is_last=body.end_of_stream))
            if kind == 5 and body.end_of_stream:
                self.call.end()

    def half_closed(self) -> None:
        self.call.end()

    def closed(self) -> None:
        pass


async def floor(port: int, endpoint: str) -> None:
    Constants.destination = messages.destination([endpoint], [], b"1.1 floor", ())
    methods, faults, connections = {f"/{SERVICE}/Process".encode(): Constants}, PortFaults(Faults(), Port.PICKER), set()

    def connect() -> GrpcConnection:
        return GrpcConnection(methods, connections, faults, Slot())

    server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--help"]):
        print(__doc__)
    elif sys.argv[3:] == ["floor"]:
        uvloop.run(floor(int(sys.argv[1]), sys.argv[2]))
    else:
        uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
