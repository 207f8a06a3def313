"""The chat template chooses the parsers of calls and of reasoning; an operator's flag overrides it."""

from __future__ import annotations

import pytest

from moestro.errors import ConfigError
from moestro.text.chats.chat_format import chat_format
from moestro.text.parsing.output_parser import REASONING_PARSERS, TOOL_PARSERS, choose_parser
from moestro.text.settings import ChatSettings

BAR, LOW = "\uff5c", "\u2581"
THINK = "{%- set content = message.content.split('</think>')[-1] %}"
# The lines by which the published templates differ, with the parsers of calls and of reasoning that they ask for.
HERMES = '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
QWEN_CODER = "<tool_call>\\n<function=example>\\n<parameter=key>\\narguments</parameter>"
GLM = "[gMASK]<sop><tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>"
DEEPSEEK = f"<{BAR}Assistant{BAR}><{BAR}tool{LOW}calls{LOW}begin{BAR}><{BAR}tool{LOW}call{LOW}begin{BAR}>"
LLAMA = 'the format {"name": function name, "parameters": dictionary of argument name and its value}.'
TEMPLATES = {
    "Qwen 2.5": (HERMES, "hermes", "none"),
    "Qwen 3": (HERMES + THINK, "hermes", "qwen3"),
    "Qwen3-Coder": (QWEN_CODER, "qwen3_coder", "none"),
    "Qwen 3.5": (QWEN_CODER + THINK, "qwen3_coder", "qwen3"),
    "GLM-4.6": (GLM + THINK, "glm45", "glm45"),
    "DeepSeek-R1": (f"{DEEPSEEK}' + '```json'{THINK}", "deepseek_v3", "deepseek_r1"),
    "DeepSeek-V3": (f"{DEEPSEEK}' + '```json'", "deepseek_v3", "none"),
    "DeepSeek-V3.1": (f"{DEEPSEEK}'+ tool['function']['name']{THINK}", "deepseek_v31", "deepseek_r1"),
    "Llama 3.1": (LLAMA, "llama3_json", "none"),
    "Mistral Small": ("[TOOL_CALLS][", "mistral", "none"),
    "Magistral": ("[TOOL_CALLS]call[ARGS] [THINK]thoughts[/THINK]", "mistral", "mistral"),
    "gpt-oss": ("<|start|>assistant<|channel|>commentary to=functions.x<|message|>", "gpt-oss", "gpt-oss"),
    "Granite 3.3": ("<|start_of_role|>assistant<|end_of_role|> respond with <|tool_call|>", "granite", "none"),
    "Llama 3.2, pythonic": ("[func_name1(params_name1=params_value1, params_name2=...)]", "pythonic", "none"),
    "without tools": ("{% for message in messages %}{{ message.content }}{% endfor %}", "none", "none"),
    "Kimi K2, whose format is unknown": ("<|tool_calls_section_begin|><|tool_call_begin|>", "none", "none"),
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_template_chooses_both_parsers(family):
    template, calls, reasoning = TEMPLATES[family]
    assert choose_parser(TOOL_PARSERS, None, template).name == calls
    assert choose_parser(REASONING_PARSERS, None, template).name == reasoning
    assert [name for name, _ in chat_format(ChatSettings(), template).choices] == [calls, reasoning]


def test_the_reason_of_a_choice_names_the_markers_or_the_flag():
    assert choose_parser(TOOL_PARSERS, None, "[TOOL_CALLS]").reason == "the chat template has [TOOL_CALLS]"
    assert choose_parser(TOOL_PARSERS, "hermes", "[TOOL_CALLS]").reason == "--tool-call-parser"
    assert "no known format" in choose_parser(TOOL_PARSERS, None, "").reason


def test_a_flag_overrides_the_template_and_none_turns_parsing_off():
    template = TEMPLATES["Qwen 3"][0]
    form = chat_format(ChatSettings(tool_call_parser="mistral", reasoning_parser="none"), template)
    assert (form.calls, form.reasoning) == (TOOL_PARSERS.make("mistral"), None)
    assert chat_format(ChatSettings(tool_call_parser="none"), template).calls is None


def test_an_unknown_parser_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"hermes.*leave --tool-call-parser out"):
        ChatSettings(tool_call_parser="herms")


def test_every_parser_of_calls_can_be_chosen_by_a_template():
    assert all(TOOL_PARSERS.make(name).TEMPLATE for name in TOOL_PARSERS.names())


def test_a_template_with_tools_in_an_unknown_format_warns_once_at_the_start(caplog):
    chat_format(ChatSettings(), "{% for tool in tools %}<|tool_calls_section_begin|>")
    [record] = caplog.records
    assert "--tool-call-parser" in record.getMessage()
    caplog.clear()
    chat_format(ChatSettings(tool_call_parser="none"), "{% for tool in tools %}")
    chat_format(ChatSettings(), "{% for tool in tools %}" + HERMES)
    assert not caplog.records
