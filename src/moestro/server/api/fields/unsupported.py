"""Fields of this and other APIs that Moestro knows and does not support, and fields that never change an answer.

An ignored field would silently change the answer, so a value that requests something is refused by name. A neutral
value, which many clients always send, is accepted. A field that becomes supported leaves its table.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from moestro.errors import RequestError, shown
from moestro.server.api.fields.protocol import Message

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
