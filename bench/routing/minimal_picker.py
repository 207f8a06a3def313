"""A picker that decides nothing: the lower bound of every picker on grpc.aio. `picker_overhead.py` runs it.

python bench/routing/minimal_picker.py 9002 127.0.0.1:8001
"""

from __future__ import annotations

import sys

import grpc
import grpc.aio
import uvloop

from moestro.gateway.picker import ext_proc_pb2 as ext_proc

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


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--help"]):
        print(__doc__)
    else:
        uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
