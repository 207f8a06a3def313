"""Decodes request bodies into typed fields; the error for an invalid body names the place of the fault.

Some fields of this and other APIs are known and not supported, and others never change an answer. An ignored field
would silently change the answer, so a value that requests something is refused by name. A neutral value, which many
clients always send, is accepted. A field that becomes supported leaves its table.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from moestro.core.clients import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_ELEMENTS,
    SCAN_BYTES,
    count_elements,
    has_long_number,
    is_too_deep,
)
from moestro.errors import RequestError, shown
from moestro.server.api.protocol import (
    BatchChatFields,
    ChatFields,
    CompletionFields,
    Message,
    ToolChoiceField,
    ToolField,
)
from moestro.web.adapters.field_places import wrong_type

Neutral = Mapping[str, tuple[object, ...]]  # Field -> values that request nothing; null is always one of them.

# Names of OpenAI, vLLM, SGLang, llama.cpp, TGI, transformers, Ollama, DeepSeek, Qwen, GLM and OpenRouter.
_BOTH: dict[str, tuple[object, ...]] = {
    "adapter_id": (),
    "add_special_tokens": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "decoder_input_details": (False,),
    "detokenize": (True,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "enable_search": (False,),
    "enable_thinking": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "flat_logprobs": (False,),
    "format": ("",),
    "grammar": ("",),
    "guidance_scale": (1,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "input": (),
    "input_embeds": (),
    "instructions": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "lora": ([],),
    "lora_path": (),
    "max_length": (),
    "max_new_tokens": (),
    "max_output_tokens": (),
    "max_tokens_to_sample": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "n_predict": (),
    "n_probs": (0,),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "num_beams": (1,),
    "num_predict": (),
    "options": ({},),
    "output_config": ({},),
    "output_format": (),
    "penalty_alpha": (0,),
    "post_sampling_probs": (False,),
    "prompt_embeds": (),
    "reasoning": ({},),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "samplers": (),
    "sampling_params": ({},),
    "sampling_seed": (),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ("", []),
    "stop_sequences": ([],),
    "stream_reasoning": (True,),
    "structural_tag": (),
    "system": ("", []),
    "tfs_z": (1,),
    "think": (),
    "thinking": (),
    "thinking_budget": (),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "typical": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermark": (False,),
    "xtc_probability": (0,),
}
_OF_CHATS: dict[str, tuple[object, ...]] = {
    "audio": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
}
IN_COMPLETIONS: Neutral = (
    _BOTH
    | _OF_CHATS
    | {  # Fields of chats, which a completion does not read.
        "add_generation_prompt": (True,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "include_reasoning": (True,),
        "max_completion_tokens": (),
        "messages": (),
        "reasoning_effort": ("medium",),
        "thinking_token_budget": (-1,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "verbosity": ("medium",),
    }
    | {"suffix": ("",)}
)
IN_CHAT: Neutral = _BOTH | _OF_CHATS | {"echo": (False,), "prompt": ()}

_OF_MESSAGES: dict[str, tuple[object, ...]] = {"container": (), "mcp_servers": ([],)}
IN_COUNTS: Neutral = _OF_MESSAGES
IN_MESSAGES: Neutral = _OF_MESSAGES | {"max_tokens_to_sample": (), "prompt": ()}
IN_RESPONSES: Neutral = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "max_tool_calls": (),
    "messages": (),
    "previous_response_id": (),
    "prompt": (),
    "response_format": (),
}

# What to do in place of a field, where "leave it out" does not say it.
_NOT_STORED = "This server stores no responses: send the whole conversation as input"
_REMEDIES_OF_RESPONSES = {
    "conversation": f"{_NOT_STORED}.",
    "previous_response_id": f"{_NOT_STORED}.",
    "background": "This server stores no responses: wait for the answer, or stream it.",
}
_REMEDIES_OF_CHATS = {"functions": "Send tools.", "function_call": "Send tool_choice."}

# Accepted without a warning: these name, account for or speed up a request, and leave its answer as it is.
WITHOUT_EFFECT = frozenset(
    {
        *("cache_prompt", "data_parallel_rank", "id_slot", "keep_alive", "kv_transfer_params", "metadata"),
        *("parallel_tool_calls", "prediction", "prompt_cache_options", "prompt_cache_retention"),
        *("rid", "safety_identifier", "client_metadata", "service_tier", "store", "stream_interval"),
        *("cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id"),  # Of Anthropic's API.
    }
)

# Below the top level: keys that ask for what is missing here, by the struct around them; null is always neutral.
REFUSED_BELOW: dict[type, Neutral] = {
    Message: {
        "audio": (),
        "function_call": (),
        "images": ([],),
        "partial": (False,),
        "prefix": (False,),
    },
}
_CONTINUE = "To continue a message, send continue_final_message: true and add_generation_prompt: false."
REMEDIES_BELOW = {"function_call": "Send tool_calls.", "partial": _CONTINUE, "prefix": _CONTINUE}
# Keys that name, annotate, cache or repeat what is beside them, wherever they stand below the top level.
HARMLESS_BELOW = frozenset(
    {
        *("annotations", "cache_control", "caller", "citations", "created_at", "data", "defer_loading", "display"),
        *("eager_input_streaming", "encrypted_content", "id", "include_obfuscation", "index", "logprobs", "metadata"),
        *("page_age", "parsed", "parsed_arguments", "phase", "retrieved_at", "signature", "status", "timestamp"),
    }
)


def refuse_unsupported(fields: Mapping[str, msgspec.Raw], neutral: Neutral) -> None:
    """Raise RequestError for the first of `fields` that `neutral` lists and whose value requests something."""
    for name, raw in fields.items():
        if name not in neutral:
            continue
        value = msgspec.json.decode(raw)
        if value is not None and value not in neutral[name]:
            given = shown(bytes(raw).decode())
            if name in _REMEDIES_OF_RESPONSES and neutral is IN_RESPONSES:
                text = f"{name}: {given} is not supported. {_REMEDIES_OF_RESPONSES[name]}"
            else:
                remedy = _REMEDIES_OF_CHATS.get(name, "Leave it out.") if neutral is IN_CHAT else "Leave it out."
                text = f"{name} is not supported yet, and {given} would change the answer. {remedy}"
            raise RequestError(text, param=name, code="unsupported_parameter")


_Trail = tuple[Any, str | int]  # The trail to the value around, and the value's key or position there.


class _KeysOf:
    """Objects and lists that a value may be, as its type says.

    Attributes:
        struct: Type of an object; None means that any key is allowed.
        keys: Shape behind each known key of an object.
        items: Shape of the items of a list; None means that they are open.
    """

    __slots__ = ("items", "keys", "struct")

    def __init__(self) -> None:
        self.struct: type | None = None
        self.keys: dict[str, _KeysOf] = {}
        self.items: _KeysOf | None = None


class NestedKeys:
    """Keys that the fields of a body may have below themselves.

    Args:
        fields: Struct of the body.
        shapes: Types by field, in place of those that the struct gives them.
    """

    def __init__(self, fields: type[msgspec.Struct], shapes: Mapping[str, Any] | None = None) -> None:
        self._known: dict[type, _KeysOf] = {}
        self._fields = _keys_of(inspect.type_info(fields), self._known).keys | {
            name: _keys_of(inspect.type_info(given), self._known) for name, given in (shapes or {}).items()
        }

    def unread(self, raw: Mapping[str, msgspec.Raw]) -> list[str]:
        """Return the places of keys that nothing reads, such as `messages[1].weight`.

        Args:
            raw: Body by the names of its fields.

        Raises:
            RequestError: A key asks for what this server does not support and what would change the answer.
        """
        found: list[str] = []
        for name, value in raw.items():
            shape = self._fields.get(name)
            if shape is not None and (shape.struct or shape.items):
                found += _unread(msgspec.json.decode(value), shape, (None, name))
        return found


def _unread(value: Any, shape: _KeysOf, trail: _Trail) -> Iterator[str]:
    if isinstance(value, dict) and shape.struct is not None:
        for key, inner in value.items():
            if key not in shape.keys:
                if inner is not None and key not in HARMLESS_BELOW:
                    place = _place((trail, key))
                    _refuse(shape.struct, key, inner, place)
                    yield place
            elif isinstance(inner, (dict, list)):
                yield from _unread(inner, shape.keys[key], (trail, key))
    elif isinstance(value, list) and shape.items is not None:
        for i, item in enumerate(value):
            yield from _unread(item, shape.items, (trail, i))


def _refuse(struct: type, key: str, value: object, place: str) -> None:
    neutral = REFUSED_BELOW.get(struct, {}).get(key)
    if neutral is None or value in neutral:
        return
    given = shown(msgspec.json.encode(value).decode())
    remedy = REMEDIES_BELOW.get(key, "Leave it out.")
    text = f"{place} is not supported, and {given} would change the answer. {remedy}"
    raise RequestError(text, param=place, code="unsupported_parameter")


def _place(trail: _Trail) -> str:
    around, last = trail
    if around is None:
        return str(last)
    return f"{_place(around)}[{last}]" if isinstance(last, int) else f"{_place(around)}.{last}"


def _keys_of(given: inspect.Type, known: dict[type, _KeysOf]) -> _KeysOf:
    """Return the shape of a type; structs may contain each other."""
    shape = _KeysOf()
    for each in given.types if isinstance(given, inspect.UnionType) else (given,):
        if isinstance(each, inspect.ListType):
            shape.items = _keys_of(each.item_type, known)
        elif isinstance(each, inspect.StructType):
            inner = known.get(each.cls)
            if inner is None:
                inner = known[each.cls] = _KeysOf()
                inner.struct = each.cls
                inner.keys.update((field.encode_name, _keys_of(field.type, known)) for field in each.fields)
            shape.struct, shape.keys = inner.struct, inner.keys
    return shape


Fields = TypeVar("Fields", bound=msgspec.Struct)
Check = Callable[[memoryview], None]

_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_NOT_QUOTABLE = re.compile(r"[^\x20\x21\x23-\x5b\x5d-\x7e]")
_MAX_NAMED = 16  # Unknown fields in a warning.
_MAX_NAME_CHARS = 100  # A longer place keeps both ends: the field, and the key below it.


class Decoded(NamedTuple, Generic[Fields]):
    """A decoded body, and the first places of what nothing reads: fields in the body's order, then keys below."""

    fields: Fields
    unknown: tuple[str, ...]


class BodyDecoder(Generic[Fields]):
    """Decodes the bodies of one path.

    Args:
        fields: Struct of the fields to read.
        neutral: Fields that are known and not supported yet, with the values that request nothing.
        ids: Name of the field that may hold more token ids than `MAX_ELEMENTS`.
        shapes: Types by field, of what is read from its JSON later.
    """

    def __init__(
        self,
        fields: type[Fields],
        neutral: Neutral | None = None,
        ids: str | None = None,
        shapes: Mapping[str, Any] | None = None,
    ) -> None:
        self._neutral = neutral or {}
        self._ids = ids
        self._decoder = msgspec.json.Decoder(fields)
        self._nested = NestedKeys(fields, shapes)
        self._known = {*fields.__struct_encode_fields__, *self._neutral}

    def __call__(self, body: bytes, check_ids: Check | None = None) -> Decoded[Fields]:
        """Return the fields of `body`, and the names of those that are unknown.

        Args:
            check_ids: Callable that refuses too many token ids; receives their JSON before they are decoded.

        Raises:
            RequestError: The body is invalid, has too many elements, or requests an unsupported feature.
        """
        try:
            _check_utf8(body)
            _refuse_slow_reading(body)
            raw = _decode_names(body)  # At most `MAX_ELEMENTS` objects, in the body's order.
            if check_ids is not None and self._ids in raw:
                check_ids(memoryview(raw[self._ids]))
            self._refuse_many_elements(body, raw)
            if is_too_deep(body):  # After the bound on elements, of which brackets are a part.
                raise _too_deep()
            refuse_unsupported(raw, self._neutral)
            fields = self._decoder.decode(body)
            unread = self._nested.unread(raw)
        except msgspec.ValidationError as error:
            raise wrong_type(error) from None
        except RecursionError:
            raise _too_deep() from None  # Where this thread has few frames left.
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _not_json(str(error)) from None
        unknown = [name for name in raw if name not in self._known and name not in WITHOUT_EFFECT]
        return Decoded(fields, named([*unknown, *unread]))

    def _refuse_many_elements(self, body: bytes, raw: dict[str, msgspec.Raw]) -> None:
        if len(body) <= MAX_ELEMENTS:
            return
        ids = self._ids
        allowed = MAX_ELEMENTS + (count_elements(raw[ids], sys.maxsize) if ids in raw else 0)
        if count_elements(body, allowed + 1) <= allowed:
            return
        counts = {
            name: count_elements(raw[name], MAX_ELEMENTS + 1) for name in raw if name in self._known and name != ids
        }
        largest = max(counts, key=counts.__getitem__, default=None)
        raise _too_many_elements(largest)


decode_completion = BodyDecoder(CompletionFields, IN_COMPLETIONS, ids="prompt")
# A template gets tools and a choice as they are written.
CHAT_SHAPES: Mapping[str, Any] = {"tools": list[ToolField], "tool_choice": ToolChoiceField}
decode_chat = BodyDecoder(ChatFields, IN_CHAT, shapes=CHAT_SHAPES)
decode_chats = BodyDecoder(BatchChatFields, IN_CHAT, shapes=CHAT_SHAPES)


def _check_utf8(body: bytes) -> None:
    """Raise UnicodeDecodeError if `body` is not UTF-8; msgspec looks only at the values that it keeps."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(body), SCAN_BYTES):
        decoder.decode(body[start : start + SCAN_BYTES], final=start + SCAN_BYTES >= len(body))


def _refuse_slow_reading(body: bytes) -> None:
    """Raise RequestError if a search for the fields of `body`, or the parsing of its numbers, would take long."""
    if len(body) <= MAX_ELEMENTS:
        return
    if count_elements(body, MAX_ELEMENTS + 1, b":") > MAX_ELEMENTS:
        raise _too_many_elements(None)
    if has_long_number(body):
        raise RequestError(f"A number in the request body may have at most {MAX_DIGITS} digits.", code="invalid_value")


def _too_many_elements(param: str | None) -> RequestError:
    return RequestError(
        f"The request body may have at most {MAX_ELEMENTS} list items and map entries, not counting token ids of a"
        " prompt. Send a shorter body, or several requests.",
        param=param,
        code="too_many_elements",
    )


def _too_deep() -> RequestError:
    text = f"The request body may be nested {MAX_DEPTH} levels deep. Send a flatter body."
    return RequestError(text, code="invalid_json")


def _not_json(cause: str) -> RequestError:
    return RequestError(f"The request body is not valid JSON: {shown(cause)}.", code="invalid_json")


def named(unknown: Sequence[str]) -> tuple[str, ...]:
    """Return a few short names, which a request may keep until its answer is complete."""
    names = tuple(map(_shortened, unknown[:_MAX_NAMED]))
    return names if len(unknown) <= _MAX_NAMED else (*names, f"and {len(unknown) - _MAX_NAMED} more")


def _shortened(name: str) -> str:
    half = _MAX_NAME_CHARS // 2
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[: half - 2]}...{name[1 - half :]}"


def refuse_unknown(unknown: Sequence[str], *, is_strict: bool) -> None:
    """Raise RequestError for the first unknown field, on a server with --strict-fields."""
    if is_strict and unknown:
        raise RequestError(
            f"{shown(unknown[0])} has no effect on this request, and this server refuses such fields"
            " (--strict-fields). Leave it out.",
            param=shown(unknown[0]),
            code="unknown_parameter",
        )


def ignored_warning(unknown: Sequence[str]) -> dict[str, str]:
    """Return the response header that names fields without effect; empty without any. Source: RFC 7234, section 5.5."""
    if not unknown:
        return {}
    return {"Warning": f'299 moestro "fields were ignored: {_NOT_QUOTABLE.sub("?", ", ".join(unknown))}"'}
