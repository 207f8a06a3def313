"""Words of the endpoint picker protocol 1.0.0 in messages of Envoy's external processing, read and written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.struct_pb2 import Struct, Value

from moestro.errors import RequestError
from moestro.gateway.clients.http_headers import LOOP_HEADER, Headers, Named, RequestHead, fault_of, size_of
from moestro.gateway.picker.ext_proc_pb2 import (
    HeaderMutation,
    HeaderValue,
    HeaderValueOption,
    HttpHeaders,
    HttpStatus,
    ImmediateResponse,
    Metadata,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from moestro.gateway.proxy import OwnAnswer
from moestro.web.errors import HttpError, error_body
from moestro.web.ports.heads import MAX_HEAD_BYTES, MAX_HEADERS, head_too_large

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
_SERVED = "x-gateway-destination-endpoint-served"
_SUBSET = "x-gateway-destination-endpoint-subset"
_SUBSET_NAMESPACE, _LB_NAMESPACE = "envoy.lb.subset_hint", "envoy.lb"
_ATTRIBUTES, _SOURCE_ADDRESS = "envoy.filters.http.ext_proc", "source.address"
_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_APPEND = HeaderValueOption.APPEND_IF_EXISTS_OR_ADD
_READ_OF_ANSWER = {name.decode(): name for name in (b":status", b"content-type", b"retry-after", LOOP_HEADER)}
_FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED

Pairs = Iterable[tuple[str, bytes]]

# --- read


class BodyPiece(NamedTuple):
    """A message with a piece of a body.

    Attributes:
        kind: `request_body` or `response_body`.
    """

    kind: str
    data: bytes
    is_last: bool


def body_piece(message: bytes | memoryview) -> BodyPiece | None:
    """Return the piece of a body that is all of a message; None where the library has to read the message.

    The library copies a body twice before it can be read, which counts for large ones.
    """
    if not message or (kind := _BODY_KINDS.get(message[0])) is None:
        return None
    size, begin = _length_at(message, 1)
    if begin + size != len(message) or not size or message[begin] != _BODY_TAG:
        return None
    size, begin = _length_at(message, begin + 1)
    end = begin + size
    rest = bytes(message[end : end + len(_END_OF_STREAM) + 1])
    if end > len(message) or rest not in (b"", _END_OF_STREAM):
        return None
    return BodyPiece(kind, bytes(message[begin:end]), bool(rest))


def _length_at(message: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the length that stands in a message, and where its bytes begin. One that cannot be read fits nothing."""
    value = shift = 0
    for place in range(at, min(at + 5, len(message))):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    return 1 << 62, at


def head_of(message: HttpHeaders) -> RequestHead:
    """Return the head of a client's request."""
    pseudo: dict[str, bytes] = {}
    headers: Headers = []
    for each in message.headers.headers:
        key, value = each.key, each.raw_value or each.value.encode()
        if key.startswith(":"):
            pseudo[key] = value
        else:
            name = key.lower().encode()
            headers.append((name, name, value))
    if (authority := pseudo.get(":authority")) is not None:
        headers.append((b"host", b"host", authority))
    named = {name: value for name, _, value in headers}
    return RequestHead(pseudo.get(":method", b""), pseudo.get(":path", b""), headers, named)


def head_fault(head: RequestHead) -> RequestError | None:
    """Return the first fault of a client's head by the rules of the router's own port; None means no fault."""
    if len(head.headers) > MAX_HEADERS or size_of(head.headers) + len(head.target) > MAX_HEAD_BYTES:
        return head_too_large()
    return fault_of(head, "1.1")


def answer_head(message: HttpHeaders) -> tuple[int, Named]:
    """Return the status of an answer, 0 without a valid one, and those of its headers that the picker reads."""
    named: Named = {}
    for each in message.headers.headers:
        if (name := _READ_OF_ANSWER.get(each.key.lower())) is not None:
            named[name] = each.raw_value or each.value.encode()
    status = named.get(b":status", b"")
    return int(status) if status.isdigit() and len(status) == 3 else 0, named


def mode_fault(message: ProcessingRequest) -> RequestError | None:
    """Return an error for a proxy that keeps bodies from the picker; None for the mode that the protocol demands."""
    if not message.HasField("protocol_config"):
        return None  # The proxy does not state its mode.
    given = message.protocol_config
    for field in ("request_body_mode", "response_body_mode"):
        if (mode := getattr(given, field)) != _FULL_DUPLEX:
            name = ProcessingMode.BodySendMode.Name(mode) if mode in ProcessingMode.BodySendMode.values() else mode
            text = (
                f"The gateway's ext_proc filter has {field} {name}. The endpoint picker protocol needs"
                f" {field}: FULL_DUPLEX_STREAMED in its processing_mode."
            )
            return HttpError(500, text, "ext_proc_mode")
    return None


def client_address(message: ProcessingRequest) -> str:
    """Return the IP address of the proxy's client; empty if the proxy does not send the attribute."""
    if _ATTRIBUTES not in message.attributes:
        return ""
    fields = message.attributes[_ATTRIBUTES].fields
    address = fields[_SOURCE_ADDRESS].string_value if _SOURCE_ADDRESS in fields else ""
    return address.rpartition(":")[0].strip("[]")


def subset_of(metadata: Metadata) -> frozenset[str] | None:
    """Return the endpoints from which the proxy wants one; None means all of the pool.

    Anything but a list of strings, or a string with commas, names no endpoint: a hint that cannot be read must not
    open the whole pool.
    """
    value = _value(metadata, _SUBSET_NAMESPACE, _SUBSET)
    if value is None:
        return None
    texts = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
    return frozenset(text.strip() for text in texts) - {""}


def served_by(metadata: Metadata) -> str:
    """Return the endpoint that has answered a request; empty if the proxy does not name one."""
    value = _value(metadata, _LB_NAMESPACE, _SERVED)
    return "" if value is None else value.string_value


# --- written


def destination(endpoints: Sequence[str], headers: Pairs, via: bytes, removed: Iterable[str]) -> bytes:
    """Return the response to a request's headers, which names the endpoints that the proxy tries in this order.

    Args:
        headers: Further headers, which replace the client's.
        via: Value that is appended to Via.
        removed: Names of client headers that engines do not get.
    """
    header, metadata = _destination_of(",".join(endpoints))
    options = b"".join([_option(name.encode(), value) for name, value in headers])
    mutation = header + options + _end_of_destination(via, tuple(removed))
    return _nested(_REQUEST_HEADERS, _nested(_RESPONSE, _nested(_HEADER_MUTATION, mutation))) + metadata


@lru_cache(maxsize=4096)
def _destination_of(value: str) -> tuple[bytes, bytes]:
    """Return the header and the metadata that name endpoints, whose values are equal by construction."""
    endpoint = Struct(fields={DESTINATION: Value(string_value=value)})
    metadata = Struct(fields={_LB_NAMESPACE: Value(struct_value=endpoint)})
    response = ProcessingResponse(dynamic_metadata=metadata).SerializeToString()
    return _option(DESTINATION.encode(), value.encode()), response


@lru_cache(maxsize=16)
def _end_of_destination(via: bytes, removed: tuple[str, ...]) -> bytes:
    """Return the part of a mutation that is the same for all requests.

    The client's destination is removed before the picker's is set, so that no second line of it is left.
    """
    option = HeaderValueOption(header=HeaderValue(key="via", raw_value=via), append_action=_APPEND)
    return bytes(HeaderMutation(set_headers=[option], remove_headers=[DESTINATION, *removed]).SerializeToString())


def request_piece(data: bytes | memoryview, *, is_last: bool) -> bytes:
    """Return a part of the request's body, unchanged."""
    before, after = _around_piece(_REQUEST_BODY, len(data), is_last)
    return b"".join((before, data, after))


def response_piece(data: bytes, *, is_last: bool) -> bytes:
    """Return a part of the answer's body, unchanged."""
    before, after = _around_piece(_RESPONSE_BODY, len(data), is_last)
    return b"".join((before, data, after))


@lru_cache(maxsize=4096)
def _around_piece(number: int, size: int, is_last: bool) -> tuple[bytes, bytes]:  # noqa: FBT001 - positional, for speed
    """Return what stands before and after a piece of a body with `size` bytes."""
    before, after = _tag(_BODY) + _varint(size) if size else b"", _END_OF_STREAM if is_last else b""
    for outer in (_STREAMED_RESPONSE, _BODY_MUTATION, _RESPONSE, number):
        before = _tag(outer) + _varint(len(before) + size + len(after)) + before
    return before, after


def request_trailers() -> bytes:
    """Return the response to trailers of a request, unchanged."""
    return _REQUEST_TRAILERS_UNCHANGED


def response_trailers() -> bytes:
    """Return the response to trailers of an answer, unchanged."""
    return _RESPONSE_TRAILERS_UNCHANGED


def answer_headers(headers: Pairs, removed: tuple[str, ...]) -> bytes:
    """Return the response to an answer's head, which the client gets with `headers` in place of the engine's."""
    options = b"".join([_option(name.encode(), value) for name, value in headers])
    mutation = _nested(_HEADER_MUTATION, options + _removed(removed))
    return _nested(_RESPONSE_HEADERS, _nested(_RESPONSE, mutation))


@lru_cache(maxsize=16)
def _removed(names: tuple[str, ...]) -> bytes:
    return bytes(HeaderMutation(remove_headers=names).SerializeToString())


def refusal(path: str, error: RequestError, request_id: str) -> bytes:
    """Return an error as the proxy's own answer, in the form of the API to which `path` belongs."""
    headers = [("content-type", b"application/json"), ("x-request-id", request_id.encode())]
    if error.retry_after_s is not None:
        headers.append(("retry-after", b"%d" % error.retry_after_s))
    headers += [(name.lower(), value.encode()) for name, value in error.headers.items()]
    body = error_body(path, error, request_id)
    return _immediate(error.http_status, headers, body, f"moestro_{error.code or error.error_type}")


def own_answer(answer: OwnAnswer, request_id: str) -> bytes:
    """Return an answer of the router itself."""
    headers = [("x-request-id", request_id.encode())]
    if answer.body:
        headers.append(("content-type", answer.content_type.encode()))
    for line in answer.header_lines.splitlines():
        name, _, value = line.partition(b": ")
        headers.append((name.decode().lower(), value))
    return _immediate(answer.status, headers, answer.body, "moestro_own_answer")


# --- inside


def _value(metadata: Metadata, namespace: str, key: str) -> Value | None:
    by_namespace = metadata.filter_metadata
    if namespace not in by_namespace:
        return None
    fields = by_namespace[namespace].fields
    return fields.get(key)


def _immediate(status: int, headers: Pairs, body: bytes, details: str) -> bytes:
    options = [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value), append_action=_OVERWRITE)
        for name, value in headers
    ]
    response = ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=status),
            headers=HeaderMutation(set_headers=options),
            body=body,
            details=details,
        )
    )
    return bytes(response.SerializeToString())


# The responses to each request are written in protobuf's form by hand: the library's objects, a dozen in a response,
# take several times as long.


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _DIGITS[value]
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _tag(number: int) -> bytes:
    """Return the tag of a field that has its length."""
    return _DIGITS[number << 3 | 2]


def _nested(number: int, data: bytes) -> bytes:
    return _DIGITS[number << 3 | 2] + _varint(len(data)) + data


def _option(name: bytes, value: bytes) -> bytes:
    """Return a header that replaces the one of its name."""
    header = _nested(_KEY, name) + (_nested(_RAW_VALUE, value) if value else b"")
    return _nested(_SET_HEADERS, _nested(_HEADER, header) + _OVERWRITES)


_DIGITS = [bytes((value,)) for value in range(0x80)]
# Numbers of fields in ext_proc.proto.
_REQUEST_HEADERS, _RESPONSE_HEADERS, _REQUEST_BODY, _RESPONSE_BODY = 1, 2, 3, 4  # ProcessingResponse
_RESPONSE = 1  # HeadersResponse, BodyResponse
_HEADER_MUTATION, _BODY_MUTATION = 2, 3  # CommonResponse
_SET_HEADERS = 1  # HeaderMutation
_HEADER = 1  # HeaderValueOption
_KEY, _RAW_VALUE = 1, 3  # HeaderValue
_STREAMED_RESPONSE = 3  # BodyMutation
_BODY = 1  # StreamedBodyResponse
_BODY_KINDS = {4 << 3 | 2: "request_body", 5 << 3 | 2: "response_body"}  # ProcessingRequest, by the tag of the field.
_BODY_TAG = 1 << 3 | 2  # HttpBody; its end_of_stream has the number that it has in StreamedBodyResponse.
_END_OF_STREAM = bytes(StreamedBodyResponse(end_of_stream=True).SerializeToString())
_OVERWRITES = bytes(HeaderValueOption(append_action=_OVERWRITE).SerializeToString())
_REQUEST_TRAILERS_UNCHANGED = bytes(ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString())
_RESPONSE_TRAILERS_UNCHANGED = bytes(ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString())
