"""Responses that the picker writes by hand, compared with those of protobuf's library."""

from __future__ import annotations

import pytest

pytest.importorskip("hpack")
pytest.importorskip("google.protobuf")

from hypothesis import given
from hypothesis import strategies as st

from moestro.gateway.picker import messages
from moestro.gateway.picker.ext_proc_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)

SIZES = (0, 1, 100, 117, 118, 119, 120, 127, 128, 2_400, 16_370, 16_383, 16_384, 62_000, 2_097_151, 2_097_152)
TEXTS = st.text(max_size=300)
PAIRS = st.lists(st.tuples(st.text(min_size=1, max_size=200), st.binary(max_size=300)), max_size=4)


def option(name: str, value: bytes, action: int = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD) -> HeaderValueOption:
    return HeaderValueOption(header=HeaderValue(key=name, raw_value=value), append_action=action)


def of_headers(mutation: HeaderMutation) -> HeadersResponse:
    return HeadersResponse(response=CommonResponse(header_mutation=mutation))


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_piece_of_a_body_is_the_librarys(size, is_last):
    data = bytes(size)
    piece = StreamedBodyResponse(body=data, end_of_stream=is_last)
    body = BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=piece)))
    for written, expected in (
        (messages.request_piece(data, is_last=is_last), ProcessingResponse(request_body=body)),
        (messages.response_piece(data, is_last=is_last), ProcessingResponse(response_body=body)),
    ):
        assert written == expected.SerializeToString()


@pytest.mark.parametrize("kind", ["request_body", "response_body"])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("size", SIZES[1:])
def test_a_piece_of_a_body_is_read_as_the_library_reads_it(size, is_last, kind):
    message = ProcessingRequest(**{kind: HttpBody(body=b"x" * size, end_of_stream=is_last)})
    for written in (message.SerializeToString(), memoryview(message.SerializeToString())):
        assert messages.body_piece(written) == (kind, b"x" * size, is_last)
    message.metadata_context.filter_metadata["envoy.lb"].update({"x": 1})
    assert messages.body_piece(message.SerializeToString()) is None, "its metadata would be lost"


@given(
    st.lists(
        st.binary(max_size=6) | st.sampled_from([b"\x22", b"\x2a", b"\x0a", b"\x10\x01", b"\x04", b"\x80"]), max_size=8
    )
)
def test_law_no_message_is_read_otherwise_than_by_the_library(parts):
    message = b"".join(parts)
    for each in (message, b"\x22%c%b" % (len(message), message), b"\x22%c\x0a%b" % (len(message) + 1, message)):
        if (piece := messages.body_piece(each)) is not None:
            read = ProcessingRequest.FromString(each)
            assert read == ProcessingRequest(**{piece.kind: HttpBody(body=piece.data, end_of_stream=piece.is_last)})


@given(st.lists(TEXTS, min_size=1, max_size=3), PAIRS, st.binary(min_size=1, max_size=40), st.lists(TEXTS, max_size=3))
def test_a_destination_is_the_librarys(endpoints, pairs, via, removed):
    value = ",".join(endpoints)
    expected = ProcessingResponse(
        request_headers=of_headers(
            HeaderMutation(
                set_headers=[
                    option(messages.DESTINATION, value.encode()),
                    *[option(*pair) for pair in pairs],
                    option("via", via, HeaderValueOption.APPEND_IF_EXISTS_OR_ADD),
                ],
                remove_headers=[messages.DESTINATION, *removed],
            )
        )
    )
    expected.dynamic_metadata.update({"envoy.lb": {messages.DESTINATION: value}})
    assert ProcessingResponse.FromString(messages.destination(endpoints, pairs, via, removed)) == expected


@given(PAIRS, st.lists(TEXTS, max_size=3))
def test_the_head_of_an_answer_is_the_librarys(pairs, removed):
    mutation = HeaderMutation(set_headers=[option(*pair) for pair in pairs], remove_headers=removed)
    expected = ProcessingResponse(response_headers=of_headers(mutation))
    assert ProcessingResponse.FromString(messages.answer_headers(pairs, tuple(removed))) == expected


def test_trailers_are_the_librarys():
    expected = (
        ProcessingResponse(request_trailers=TrailersResponse()),
        ProcessingResponse(response_trailers=TrailersResponse()),
    )
    written = messages.request_trailers(), messages.response_trailers()
    assert tuple(map(ProcessingResponse.FromString, written)) == expected
