"""Requests of clients and the outputs they get: frozen values that travel between processes; and the model's facts.

A grammar says what an answer must follow. Its masks are functions of the grammar and of the answer's tokens so far,
like all changes to logits: neither the batch, nor a chunk, nor a preemption, nor another engine changes them. A script
is the future of a replayed request, which no policy sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Protocol, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import HASH_BYTES

GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "choice", "lark")


@dataclass(frozen=True, slots=True)
class Grammar:
    """Language to which the text of an answer is limited. Only an end token can follow a complete text.

    Attributes:
        kind: one of `GRAMMAR_KINDS`.
        text: the JSON schema, the regular expression, a JSON list of strings, or a grammar in Lark's notation or in
            EBNF. The text of a `json_object` is empty.
        is_light: whether a check has found that it compiles in milliseconds. It changes where masks are computed, and
            no mask; equal grammars may differ in it.
    """

    kind: str
    text: str = ""
    is_light: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise ValueError(f"the kind of a grammar must be one of {', '.join(GRAMMAR_KINDS)}, got {self.kind!r}")


@dataclass(frozen=True, slots=True, eq=False)
class MaskRequest:
    """Request for the mask of the next token of one sequence.

    Attributes:
        matcher: what `GrammarBackend.matcher` returned for the sequence.
        generated: int32[n], all tokens of the answer so far.
        unwanted: int32[m], tokens that are excluded as long as the grammar allows others: stop tokens before
            `min_tokens`.
    """

    matcher: Any
    generated: NDArray[np.int32]
    unwanted: NDArray[np.int32]


class TokenMask(Protocol):
    """Mask of one row of logits, computed beside the step."""

    def words(self) -> NDArray[np.int32] | None:
        """int32[words], bit t % 32 of word t // 32 says whether token t is allowed; the same at each call.

        None means that the mask is not ready: the row gets no token in this step.
        """
        ...


class GrammarBackend(Protocol):
    """Computes the masks of a rank; `grammar.backend` has one."""

    def matcher(self, grammar: Grammar) -> Any:
        """Return the matcher of a new sequence."""
        ...

    def masks(self, requests: Sequence[MaskRequest]) -> Sequence[TokenMask]:
        """Return the masks of a plan's sequences, which are computed while the plan is."""
        ...

    def is_ready(self, matcher: Any) -> bool:
        """Whether the mask that was requested last is computed, or no mask is being computed."""
        ...

    def failure(self, matcher: Any) -> str | None:
        """Return why a matcher allows no token any more; None means that it works."""
        ...


class Script(msgspec.Struct, frozen=True, gc=False):
    """Answer of a traced request: its length, and the hashes of the blocks that it completes.

    Attributes:
        num_output_tokens: tokens after which the request ends, at least 1; `max_tokens` may end it earlier.
        block_hashes: packed, HASH_BYTES for each block that the answer completes, in order. The first is the block of
            the prompt's last tokens, if it is partial. The list ends early where the trace knows no more.
        request_key: key of the request (`core.work`), which decides the experts that its tokens visit. None
            means a key from its serial number, which differs between engines.
    """

    num_output_tokens: int
    block_hashes: bytes = b""
    request_key: int | None = None

    def __post_init__(self) -> None:
        if self.num_output_tokens < 1:
            raise ValueError(f"num_output_tokens must be at least 1, got {self.num_output_tokens}")
        if len(self.block_hashes) % HASH_BYTES:
            raise ValueError(f"block_hashes holds {len(self.block_hashes)} bytes, not a multiple of {HASH_BYTES}")


MAX_LISTED_TOKENS = 20  # tokens of `SamplingParams.logprob_token_ids`


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token, or (in the API server) a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client disconnected
    ERROR = "error"  # the rank failed
    NON_FINITE = "non_finite_logits"  # the logits hold NaN or infinity, so there is no next token
    EXCLUDED = "all_tokens_excluded"  # the request's own limits leave no token that the model considers possible
    GRAMMAR = "grammar_limit"  # the grammar is too complex at this place of the answer


# With these a sequence ends instead of gaining its next token.
WITHOUT_TOKEN = frozenset({FinishReason.NON_FINITE, FinishReason.EXCLUDED, FinishReason.GRAMMAR})


class ServiceClass(StrEnum):
    """Class of a request for scheduling."""

    LS = "ls"  # latency-sensitive
    BE = "be"  # best-effort


@dataclass(frozen=True, slots=True)
class AllowedRange:
    """Values of a sampling parameter that a client, or a checkpoint's authors, may choose.

    Attributes:
        low, high: bounds, both allowed.
        is_above_low: whether `low` itself is not allowed.
    """

    low: float
    high: float
    is_above_low: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.is_above_low and value == self.low)

    def __str__(self) -> str:
        if self.is_above_low:
            return f"above {self.low} and at most {self.high}"
        return f"between {self.low} and {self.high}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Parameters for choosing the next token. Names and meanings are vLLM's.

    A field with an `AllowedRange` is a column of `SAMPLING_ROW`, and requests are checked against that range.
    """

    max_tokens: int = 16  # with 0 the prompt is computed, for example for its logprobs, and no token is sampled
    min_tokens: int = 0  # `stop_token_ids` are not sampled before this many tokens
    temperature: Annotated[float, AllowedRange(0, 2)] = 1.0  # 0 means greedy
    top_p: Annotated[float, AllowedRange(0, 1, is_above_low=True)] = 1.0
    top_k: Annotated[int, AllowedRange(-1, 2**31 - 1)] = 0  # 0 means all tokens; a client may also write -1
    # Tokens less likely than this fraction of the most likely one are excluded.
    min_p: Annotated[float, AllowedRange(0, 1)] = 0.0
    # Subtracted from the logit of each generated token.
    presence_penalty: Annotated[float, AllowedRange(-2, 2)] = 0.0
    # Subtracted from the logit of each generated token, once for each time that the token was generated.
    frequency_penalty: Annotated[float, AllowedRange(-2, 2)] = 0.0
    # Divides positive and multiplies negative logits of prompt and generated tokens.
    repetition_penalty: Annotated[float, AllowedRange(0.01, 100)] = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit), each id once
    seed: int = 0  # 0 .. 2**64 - 1; the API server draws one when the client gives none
    stop_token_ids: tuple[int, ...] = ()  # includes the model's end tokens, unless the client ignores them
    logprobs: int | None = None  # alternatives reported for each sampled token; None means no logprobs
    prompt_logprobs: int | None = None  # the same for each prompt token except the first
    # Tokens reported for each sampled one, in place of the most likely ones; then `logprobs` is their number.
    logprob_token_ids: tuple[int, ...] = ()
    lists_prompt: bool = False  # whether they are those of prompt tokens too; then `prompt_logprobs` is their number
    grammar: Grammar | None = None  # language of the answer's text; None means any text
    allowed_tokens: bytes = b""  # `packed_tokens`: no other tokens are sampled; b"" means all tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that no answer contains

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens must not be negative, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be in 0 .. max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in 0 .. 2**64 - 1, got {self.seed}")
        num_listed = len(self.logprob_token_ids)
        if num_listed > MAX_LISTED_TOKENS or (num_listed and self.logprobs != num_listed):
            raise ValueError(f"logprobs must be the number of logprob_token_ids, {num_listed}, got {self.logprobs}")

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def edits_logits(self) -> bool:
        """Whether the logits are changed before a token is chosen, beyond temperature and filters."""
        limits = self.logit_bias or self.grammar or self.allowed_tokens or self.bad_words
        return self.has_penalties or bool(limits or (self.min_tokens and self.stop_token_ids))


_WORD_BITS = 32


def packed_tokens(token_ids: Sequence[int]) -> bytes:
    """Return a mask of `token_ids`, int32 words in which token t is bit t % 32 of word t // 32.

    However many tokens a request lists, its copies carry one bit for each token of the vocabulary.
    """
    if not token_ids:
        return b""
    bits = np.zeros((max(token_ids) // _WORD_BITS + 1) * _WORD_BITS, np.uint8)
    bits[np.array(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32).tobytes()


def _allowed_ranges() -> dict[str, AllowedRange]:
    hints: dict[str, Any] = get_type_hints(SamplingParams, include_extras=True)
    return {
        name: each
        for name, hint in hints.items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, AllowedRange)
    }


# Sampling parameters that are plain numbers, by name.
SAMPLING_RANGES: Mapping[str, AllowedRange] = _allowed_ranges()


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values for parameters that a client omits: neutral ones, or those that the checkpoint recommends."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation job. Its progress is kept in a rank's `Sequence`, never here.

    Attributes:
        num_prompt_tokens: length of the prompt, at least 1.
        arrival_ns: time of arrival.
        token_ids: packed int32, the prompt. None means that a hashed trace is replayed.
        resumed_token_ids: packed int32, tokens of the answer that another engine generated before it failed. They
            follow the prompt and are not part of it; the new engine continues as if it had sampled them.
        block_hashes: HASH_BYTES for each full block of the prompt, made once where the request enters.
        hash_key: key of these hashes, made of model, adapter and salt.
        cache_salt: the salt in `hash_key`, for processes that hash the same blocks.
        priority: lower is earlier.
        user: name of the user, as given by the client; for affinity and fair shares, never for access.
        traceparent: context of the client's span, by W3C Trace Context; None where spans are not recorded.
        tenant: name of the tenant whose key the request has; None means that the key has none.
        client: name of the client, which its body cannot choose: its key or address. None means unknown.
        session_id: name of the conversation that the request continues, where known.
    """

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival_ns: int
    token_ids: bytes | None = None
    resumed_token_ids: bytes = b""
    block_hashes: bytes = b""
    hash_key: bytes = b""
    cache_salt: str | None = None
    priority: int = 0
    service_class: ServiceClass = ServiceClass.LS
    user: str | None = None
    client: str | None = None
    session_id: str | None = None
    tenant: str | None = None
    traceparent: str | None = None

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1:
            raise ValueError(f"request {self.request_id!r}: empty prompt")
        if self.token_ids is not None and len(self.token_ids) != 4 * self.num_prompt_tokens:
            raise ValueError(f"request {self.request_id!r}: token_ids holds {len(self.token_ids)} bytes")
        if len(self.resumed_token_ids) % 4:
            raise ValueError(
                f"request {self.request_id!r}: resumed_token_ids holds {len(self.resumed_token_ids)} bytes,"
                " not a multiple of 4"
            )
        if self.resumed_token_ids and self.num_resumed_tokens >= self.sampling.max_tokens:
            raise ValueError(
                f"request {self.request_id!r}: {self.num_resumed_tokens} resumed tokens leave none of"
                f" {self.sampling.max_tokens} to generate"
            )
        if len(self.block_hashes) % HASH_BYTES:
            raise ValueError(
                f"request {self.request_id!r}: block_hashes must be a multiple of {HASH_BYTES} bytes,"
                f" got {len(self.block_hashes)}"
            )

    @property
    def fair_user(self) -> str | None:
        """Name by which fair shares go: the tenant, which no body can choose, else the user."""
        return self.tenant or self.user

    @property
    def num_resumed_tokens(self) -> int:
        """Tokens of the answer that another engine generated."""
        return len(self.resumed_token_ids) // 4

    @property
    def num_known_tokens(self) -> int:
        """Tokens that an engine computes before it samples one: the prompt and the resumed tokens."""
        return self.num_prompt_tokens + self.num_resumed_tokens

    @property
    def num_total_tokens(self) -> int:
        """Tokens of the prompt, and the most that may be generated."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    def token_array(self) -> NDArray[np.int32]:
        """int32[num_prompt_tokens], the prompt of a request that carries token ids."""
        assert self.token_ids is not None, f"request {self.request_id!r} carries no token ids"
        return np.frombuffer(self.token_ids, np.int32)

    def resumed_array(self) -> NDArray[np.int32]:
        """int32[num_resumed_tokens], the resumed tokens."""
        return np.frombuffer(self.resumed_token_ids, np.int32)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities at one position, of the raw distribution (before temperature)."""

    token_id: int
    logprob: float
    rank: int  # 1 for the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first or as the request lists them


_encode_entries = msgspec.msgpack.Encoder().encode
_decode_entries = msgspec.msgpack.Decoder(tuple[TokenLogprobs, ...]).decode
_PACKED_SCORES = 4096  # log probabilities of a piece, which is decoded in about 1 ms


class PackedLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities of the tokens of a prompt, which may be hundreds of thousands.

    They travel encoded, so that the API server's event loop does not decode them: the thread that needs them does, a
    piece at a time.

    Attributes:
        pieces: encoded entries.
        num_entries, num_scores: tokens, and log probabilities with those of the alternatives.
    """

    pieces: tuple[bytes, ...]
    num_entries: int
    num_scores: int

    @classmethod
    def pack(cls, entries: Sequence[TokenLogprobs]) -> PackedLogprobs:
        """Encode `entries`."""
        num_scores = len(entries) + sum([len(entry.top) for entry in entries])
        step = max(1, _PACKED_SCORES * len(entries) // max(num_scores, 1))
        pieces = [_encode_entries(entries[first : first + step]) for first in range(0, len(entries), step)]
        return cls(tuple(pieces), len(entries), num_scores)

    def __len__(self) -> int:
        return self.num_entries

    def __iter__(self) -> Iterator[TokenLogprobs]:
        """Yield the entries, decoded a piece at a time."""
        for piece in self.pieces:
            yield from _decode_entries(piece)


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Output of one request in one step; the last one carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: PackedLogprobs | None = None  # once, with the first token or the end
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache, of either tier, at first admission
    num_host_tokens: int = 0  # those of them that were copied from host memory
    admitted_ns: int = 0  # time of first admission, by the rank's clock
    num_preemptions: int = 0  # times that the request gave up its KV so far


class NewOutputs(msgspec.Struct, frozen=True, gc=False):
    """New outputs of a step. Columns hold those of one further token, as most are; the others are objects.

    Attributes:
        others: Outputs that are first or last, or have more than a token.
        request_ids: Each request that gained one further token and nothing else.
        token_ids: The token of each of these.
    """

    others: tuple[Output, ...] = ()
    request_ids: tuple[str, ...] = ()
    token_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.others) + len(self.request_ids)

    def __iter__(self) -> Iterator[Output]:
        """Yield the output of each request."""
        yield from self.others
        for request_id, token_id in zip(self.request_ids, self.token_ids, strict=True):
            yield Output(request_id=request_id, token_ids=(token_id,))


class CardMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Uses of an accelerator's memory, in bytes.

    Attributes:
        total_bytes: memory of the card.
        num_sharing: processes of the server that use the card.
        weight_bytes, other_bytes: weights of one process; libraries and other programs.
        step_bytes, graph_bytes: the most that a step takes while it runs; recorded steps.
        kv_bytes: KV cache of one process.
    """

    total_bytes: int
    num_sharing: int
    weight_bytes: int
    other_bytes: int
    step_bytes: int
    graph_bytes: int
    kv_bytes: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded network and its KV cache, for the scheduler and the API server.

    Attributes:
        model_id: key of the block hashes.
        max_model_len: tokens of the longest sequence that is served.
        vocab_size: token ids are in 0 .. vocab_size - 1.
        eos_token_ids: tokens that end a sequence, ascending.
        sampling_defaults: values for fields that a request does not set.
        block_size: tokens of a KV block.
        num_blocks: KV blocks.
        num_host_blocks: blocks of host memory for KV: of preempted sequences, and below the prefix cache.
        block_bytes: KV of one block in all layers of the rank; 0 without a KV cache.
        host_block_ns: measured time of the copy of such a block to the device. None means that there are none.
        num_parameters: all parameters of the network.
        model_type: the family's name in transformers.
        dtype: of weights and KV, for instance `bfloat16`.
        device: for instance `cpu` or `cuda`.
        num_layers: transformer blocks.
        num_experts: routed experts of a layer; 0 means a dense model.
        num_experts_per_token: experts that each token visits in a layer; 0 means a dense model.
        pace_dilation: factor on the modelled durations of a paced device; 1 without one.
        notes: notes for the operator, one sentence each.
        has_logits: whether a network computes logits; a paced device without arithmetic has none.
        card: memory of the accelerator; None on a CPU and on a paced device.
        is_exact: whether batch and schedule never change tokens, so that another engine can continue an answer.
    """

    model_id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    block_size: int
    num_blocks: int
    num_host_blocks: int = 0
    block_bytes: int = 0
    host_block_ns: int | None = None
    num_parameters: int
    model_type: str
    dtype: str
    device: str
    num_layers: int
    num_experts: int
    num_experts_per_token: int
    pace_dilation: float = 1.0
    notes: tuple[str, ...] = ()
    has_logits: bool = True
    card: CardMemory | None = None
    is_exact: bool = False
