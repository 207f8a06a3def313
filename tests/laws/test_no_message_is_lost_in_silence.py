"""Law: a message of a chat leaves a trace in the prompt, or the request is a 400 that names it.

The templates are written after the published ones, each with what it does to roles, and some drop what no published one
does. The oracle renders a chat without each of its messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.test_request_builder import INFO

from moestro.errors import RequestError
from moestro.server.api.request_builder import ServedModel, chat_prompt
from moestro.server.api.validation import parse_chat
from moestro.text.tokenizer import PLAIN, Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TEMPLATES = {
    "ChatML": CHATML,
    "Qwen 2.5": """
{%- if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n
{%- else %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}
<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n
{%- elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}
{%- for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n
{%- elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% endif %}
{%- endfor %}<|im_start|>assistant\n""",
    "Qwen 3": """
{%- for m in messages %}
{%- set content = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}
<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n
{%- endfor %}<|im_start|>assistant\n""",
    "Llama 3": """<|begin_of_text|>{% for m in messages %}
{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>' }}\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}""",
    "Mistral": """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if system else messages) %}
{%- if m.role == 'user' %}[INST] {{ system ~ '\n\n' if system and loop.last }}{{ m.content }}[/INST]
{%- elif m.role == 'assistant' %} {{ m.content }}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}
{%- endfor %}""",
    "DeepSeek R1": """
{%- set ns = namespace(system='') %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = m.content %}{% endfor %}
{{- ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}<|User|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end|>
{%- elif m.role == 'tool' %}<|tool|>{{ m.content }}{% endif %}{% endfor %}<|Assistant|><think>\n""",
    "gpt-oss": """
{%- for m in messages %}{% if m.role == 'developer' or (m.role == 'system' and loop.first) %}
<|start|>developer<|message|>{{ m.content }}<|end|>
{%- elif m.role in ('user', 'assistant', 'tool') %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}<|start|>assistant""",
    "no system": "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "the last one": "<{{ messages[-1].role }}>{{ messages[-1].content }}",
    "upper case": "{% for m in messages if m.role != 'tool' %}{{ m.content | upper }}{% endfor %}",
    "one of each role": """{% for role in ('system', 'user', 'assistant') %}
{{- (messages | selectattr('role', 'equalto', role) | list | last | default({'content': ''})).content }}{% endfor %}""",
    "roles alone": "{% for m in messages %}[{{ m.role }}]{% endfor %}",
    "strict": "{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATML,
}
# Short texts repeat each other, and what templates write by themselves.
TEXTS = st.sampled_from(["a", "hi", "hi there", "system", "You are a helpful assistant.", "</think>x", " hi ", "user"])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["developer", "system", "user", "assistant", "tool"]), "content": TEXTS}
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request, demo_dir) -> Iterator[ServedModel]:
    tokenizer = Tokenizer(demo_dir, TEMPLATES[request.param])
    yield ServedModel(names=("m",), created=0, fingerprint="fp", info=INFO, tokenizer=tokenizer)
    tokenizer.close()


def rendered(model: ServedModel, messages: list[dict[str, Any]]) -> str | None:
    try:
        return model.tokenizer.render_chat(messages, options=PLAIN)
    except RequestError:
        return None


def lost(model: ServedModel, messages: list[dict[str, Any]]) -> set[int]:
    """The messages without which the prompt is the same."""
    prompt = rendered(model, messages)
    return {
        i
        for i in range(len(messages))
        if messages[1:] and rendered(model, [*messages[:i], *messages[i + 1 :]]) == prompt
    }


def refused(model: ServedModel, messages: list[dict[str, Any]]) -> str | None:
    """The place that a refusal names; None for a chat that is served."""
    try:
        chat_prompt(parse_chat(json.dumps({"messages": messages}).encode()), model)
    except RequestError as error:
        return error.param if error.code == "message_without_effect" else str(error)
    return None


@settings(max_examples=25)
@given(messages=MESSAGES)
def test_a_message_without_a_trace_is_refused_by_its_place(model, messages):
    if rendered(model, messages) is None:
        return
    without_trace = {f"messages[{i}]" for i in lost(model, messages)}
    place = refused(model, messages)
    if len(messages) == 1:  # There is no chat without it.
        assert place in (None, "messages[0]")
    elif without_trace:
        assert place in without_trace
    else:
        assert place is None


@pytest.mark.parametrize("text", ["Be brief.", "hi"])
def test_a_role_that_a_template_drops_is_refused_also_where_its_text_stands_elsewhere(demo_dir, text):
    tokenizer = Tokenizer(demo_dir, TEMPLATES["no system"])
    model = ServedModel(names=("m",), created=0, fingerprint="fp", info=INFO, tokenizer=tokenizer)
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "hi, be kind. Be brief."}]
    with pytest.raises(RequestError, match=r"messages\[0\] leaves no trace"):
        chat_prompt(parse_chat(json.dumps({"messages": messages}).encode()), model)
    tokenizer.close()
