"""Fields of the API that Moestro knows and does not support yet.

An ignored field would silently change the answer, so a value that requests something is refused by name. A neutral
value, which many clients always send, is accepted.
"""

from __future__ import annotations

import msgspec

from moestro.errors import RequestError, shown

_TEXT = {"type": "text"}

# Field -> values that request nothing; null is always one of them.
_BOTH: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "ebnf": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "regex": (),
    "repetition_detection": (),
    "response_format": (_TEXT,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
IN_COMPLETIONS = _BOTH | {"prompt_embeds": (), "suffix": ("",)}
IN_CHAT = _BOTH | {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("medium",),  # The API's default, as for verbosity.
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def refuse_unsupported(fields: dict[str, msgspec.Raw], neutral: dict[str, tuple[object, ...]]) -> None:
    """Raise RequestError, which names the field, if a field of `neutral` has a value that requests something."""
    for name in fields.keys() & neutral.keys():
        value = msgspec.json.decode(fields[name])
        if value is not None and value not in neutral[name]:
            raise RequestError(
                f"{name} is not supported yet, and {shown(value)} would change the answer. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
