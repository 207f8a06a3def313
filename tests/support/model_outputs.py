"""Answers as models write them, by format, with what a client should get.

They follow the chat templates and format guides that the parsers name as their sources.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from moestro.text.parsing.output_parser import ToolSpec

WEATHER = ToolSpec(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/Place"},
        },
        "$defs": {"Place": {"type": "object"}},
    },
)
WRITE = ToolSpec(
    "write_file", {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
)
PING = ToolSpec("ping", {})
TOOLS = (WEATHER, WRITE, PING)


@dataclass(frozen=True)
class Parsed:
    """What a client should get: content, reasoning, and calls as (name, arguments as text)."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


PARIS = ("get_weather", '{"city": "Paris", "days": 3}')
ODD = '{"city": "K\\u00f6ln \\"}</tool_call>{[ \\\\", "emoji": "日é🙂", "nested": {"a": [1, {"b": null}]}}'
CODE = "if a < b and c > d:\n    print(\"</para\", 'x')\n"


def _deepseek(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


def deepseek(*calls: tuple[str, str], version: str = "v3") -> str:
    """A list of calls in DeepSeek's tokens."""
    texts = []
    for name, arguments in calls:
        between = f"function{_deepseek('tool sep')}{name}\n```json\n{arguments}\n```"
        if version == "v31":
            between = f"{name}{_deepseek('tool sep')}{arguments}"
        texts.append(f"{_deepseek('tool call begin')}{between}{_deepseek('tool call end')}")
    joint = "" if version == "v31" else "\n"
    return f"{_deepseek('tool calls begin')}{joint.join(texts)}{_deepseek('tool calls end')}"


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def qwen(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, **parameters: str) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in parameters.items())
    return f"<tool_call>{name}\n{inner}</tool_call>"


def harmony(kind: str, text: str, end: str = "<|end|>") -> str:
    return f"<|channel|>{kind}<|message|>{text}{end}"


_TO_WEATHER = "commentary to=functions.get_weather <|constrain|>json"
_NEXT = "<|start|>assistant"
_TYPED = '{"city": "Paris\\n2", "days": 3, "units": null, "place": {"zip": "75001", "of": [1.5, true]}}'

# Format -> (answer of a model, what a client gets).
ANSWERS: dict[str, list[tuple[str, Parsed]]] = {
    "hermes": [
        (f"I'll look.\n{hermes(*PARIS)}", Parsed("I'll look.", calls=(PARIS,))),
        (f"{hermes(*PARIS)}\n{hermes('ping', '{}')}\n", Parsed(calls=(PARIS, ("ping", "{}")))),
        (hermes("get_weather", ODD), Parsed(calls=(("get_weather", ODD),))),
        ('<tool_call>{"arguments": {"a": 1}, "name": "ping"}</tool_call>', Parsed(calls=(("ping", '{"a": 1}'),))),
        ('<tool_call>{"name": "ping"}</tool_call> Done.', Parsed("Done.", calls=(("ping", "{}"),))),
        ('<tool_call>{"name": "ping", "arguments": "{\\"a\\": 1}"}', Parsed(calls=(("ping", '{"a": 1}'),))),
        ("A < B, <tool", Parsed("A < B, <tool")),
    ],
    "qwen3_coder": [
        (f"Sure.\n\n{qwen('get_weather', city='Paris', days='3')}", Parsed("Sure.", calls=(PARIS,))),
        (f"{qwen('ping')}\n{qwen('get_weather', city='Paris', days='3')}", Parsed(calls=(("ping", "{}"), PARIS))),
        (
            qwen("write_file", path="a.py", text=CODE),
            Parsed(calls=(("write_file", json.dumps({"path": "a.py", "text": CODE}, ensure_ascii=False)),)),
        ),
        (
            qwen("get_weather", city="Paris\n2", days="3", units="None", place='{"zip": "75001", "of": [1.5, true]}'),
            Parsed(calls=(("get_weather", _TYPED),)),
        ),
        (
            qwen("get_weather", days="many", unknown="7"),
            Parsed(calls=(("get_weather", '{"days": "many", "unknown": "7"}'),)),
        ),
        (
            qwen("write_file", text="Tags: </parameter> and </function>, <parameter=x>."),
            Parsed(calls=(("write_file", '{"text": "Tags: </parameter> and </function>, <parameter=x>."}'),)),
        ),
        (
            "<function=get_weather><parameter=city>Paris</parameter><parameter=days>3</parameter></function>",
            Parsed(calls=(PARIS,)),
        ),
        ("<function=ping>\n</function>", Parsed(calls=(("ping", "{}"),))),
        ("<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>", Parsed(calls=(PARIS,))),
    ],
    "glm45": [
        (f"Let me see.\n{glm('get_weather', city='Paris', days='3')}", Parsed("Let me see.", calls=(PARIS,))),
        (f"{glm('ping')}\n{glm('get_weather', city='Paris', days='3')}", Parsed(calls=(("ping", "{}"), PARIS))),
        ("<tool_call>ping</tool_call>", Parsed(calls=(("ping", "{}"),))),
        (
            glm("get_weather", city="Paris", days="3").replace("\n", ""),
            Parsed(calls=(PARIS,)),
        ),
        (glm("write_file", text=CODE), Parsed(calls=(("write_file", json.dumps({"text": CODE}, ensure_ascii=False)),))),
    ],
    "deepseek_v3": [
        (f"Checking.{deepseek(PARIS)}", Parsed("Checking.", calls=(PARIS,))),
        (deepseek(PARIS, ("ping", "{}")), Parsed(calls=(PARIS, ("ping", "{}")))),
        (deepseek(("get_weather", ODD)), Parsed(calls=(("get_weather", ODD),))),
        (deepseek(("ping", '{\n  "a": "```"\n}')), Parsed(calls=(("ping", '{\n  "a": "```"\n}'),))),
    ],
    "deepseek_v31": [
        (
            f"Checking.{deepseek(PARIS, ('ping', '{}'), version='v31')}",
            Parsed("Checking.", calls=(PARIS, ("ping", "{}"))),
        ),
    ],
    "mistral": [
        (f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS[1]}}}]', Parsed(calls=(PARIS,))),
        (
            f'Fine.[TOOL_CALLS][{{"name": "ping", "arguments": {{}}}}, {{"name": "get_weather", "arguments": {ODD}}}]',
            Parsed("Fine.", calls=(("ping", "{}"), ("get_weather", ODD))),
        ),
        (f"[TOOL_CALLS]get_weather[ARGS]{PARIS[1]}[TOOL_CALLS]ping[ARGS]{{}}", Parsed(calls=(PARIS, ("ping", "{}")))),
        (f"[TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]{PARIS[1]}", Parsed(calls=(PARIS,))),
        (f"[TOOL_CALLS]get_weather{ODD}", Parsed(calls=(("get_weather", ODD),))),
    ],
    "granite": [
        (f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS[1]}}}]', Parsed(calls=(PARIS,))),
        ('<tool_call>[{"name": "ping"}, {"name": "ping"}]', Parsed(calls=(("ping", "{}"), ("ping", "{}")))),
        (f'[{{"name": "get_weather", "arguments": {ODD}}}]', Parsed(calls=(("get_weather", ODD),))),
        (
            f'I look.\n<|tool_call|> [{{"name": "get_weather", "arguments": {PARIS[1]}}}]\n',
            Parsed("I look.", calls=(PARIS,)),
        ),
        ("[1] is a source.", Parsed("[1] is a source.")),
    ],
    "pythonic": [
        ("[get_weather(city='Paris', days=3), ping()]", Parsed(calls=(PARIS, ("ping", "{}")))),
        (
            "<|python_start|>[get_weather(city=\"K'\\n(\", place={'zip': [1.5, True, None, false]})]<|python_end|>",
            Parsed(calls=(("get_weather", '{"city": "K\'\\n(", "place": {"zip": [1.5, true, null, false]}}'),)),
        ),
        (
            "[write_file(text='a\nb\\'c', text='d')]",
            Parsed(calls=(("write_file", '{"text": "a\\nb\'c"}'),)),
        ),
        ("[ping] [1, 2]", Parsed("[ping] [1, 2]")),
    ],
    "llama3_json": [
        (f'{{"name": "get_weather", "parameters": {PARIS[1]}}}', Parsed(calls=(PARIS,))),
        (
            f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {PARIS[1]}}}; {{"name":"ping"}}',
            Parsed(calls=(PARIS, ("ping", "{}"))),
        ),
        ('{"name": "Ann", "parameters": {}}', Parsed('{"name": "Ann", "parameters": {}}')),
        ('{"answer": 42}', Parsed('{"answer": 42}')),
        ('Use {"name": "ping"}.', Parsed('Use {"name": "ping"}.')),
        ('{"name": "ping", "parameters": {}}; and more', Parsed("; and more", calls=(("ping", "{}"),))),
    ],
    "gpt-oss": [
        (
            f"{harmony('analysis', 'Need the weather.')}{_NEXT}{harmony(_TO_WEATHER, PARIS[1], '<|call|>')}",
            Parsed(reasoning="Need the weather.", calls=(PARIS,)),
        ),
        (
            _NEXT.join([harmony("analysis", "One."), harmony("analysis", "Two."), harmony("final", "日é <b>🙂", "")]),
            Parsed("日é <b>🙂", "One.\nTwo."),
        ),
        (
            f"{harmony('commentary', 'I look.')}{_NEXT} to=functions.ping{harmony('commentary json', '{}', '')}",
            Parsed("I look.", calls=(("ping", "{}"),)),
        ),
        (harmony("commentary to=browser.search", '{"q": 1}', "<|call|>"), Parsed('{"q": 1}')),
        (
            ' to=functions.ping<|channel|>analysis <|constrain|>json<|message|>{"a": 1}',
            Parsed(calls=(("ping", '{"a": 1}'),)),
        ),
        (
            harmony(_TO_WEATHER, '{"city": "<|call|><|channel|>analysis<|message|>"}', "<|call|>"),
            Parsed(calls=(("get_weather", '{"city": "<|call|><|channel|>analysis<|message|>"}'),)),
        ),
        ("No channel at all.", Parsed("No channel at all.")),
    ],
}

# Format -> (broken answer, what a client gets). Nothing may be lost, and nothing may raise.
BROKEN: dict[str, list[tuple[str, Parsed]]] = {
    "hermes": [
        ("Hi.\n<tool_call>\n", Parsed("Hi.")),
        ('<tool_call>{"name": "pong"}</tool_call>', Parsed('<tool_call>{"name": "pong"}</tool_call>')),
        ("<tool_call>sorry</tool_call> no", Parsed("<tool_call>sorry</tool_call> no")),
        ('<tool_call>{"name": "ping", "argu', Parsed(calls=(("ping", ""),))),
        ('<tool_call>{"nam', Parsed('<tool_call>{"nam')),
        ('<tool_call>{"name": 7}</tool_call>', Parsed('<tool_call>{"name": 7}</tool_call>')),
        ('<tool_call>{"name": "ping", "arguments": {"a": </tool_call>x', Parsed("x", calls=(("ping", "{}"),))),
        (f"<tool_call>{hermes('ping', '{}')}", Parsed("<tool_call>", calls=(("ping", "{}"),))),
        ('<tool_call>{"name": "' + "x" * 300, Parsed('<tool_call>{"name": "' + "x" * 300)),
    ],
    "qwen3_coder": [
        ("<tool_call>\n<parameter=a>", Parsed("<tool_call>\n<parameter=a>")),
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
            Parsed(calls=(("get_weather", '{"city": "Par'),)),
        ),
        ("<function=get_weather\n>", Parsed("<function=get_weather\n>")),
        ("<function=ping>text</function>", Parsed("text", calls=(("ping", "{}"),))),
        ("<function=>", Parsed("<function=>")),
        (
            "Call <function=pong> or <function=ping></function>",
            Parsed("Call <function=pong> or", calls=(("ping", "{}"),)),
        ),
    ],
    "glm45": [
        ("<tool_call>\n</tool_call>", Parsed("<tool_call>\n</tool_call>")),
        ("A <tool_call> tag. <tool_call>ping</tool_call>", Parsed("A <tool_call> tag.", calls=(("ping", "{}"),))),
        ("<tool_call>get_weather\ncity", Parsed("<tool_call>get_weather\ncity")),
        ("<tool_call>ping\n<arg_key>a</arg_key>", Parsed(calls=(("ping", ""),))),
    ],
    "deepseek_v3": [
        (_deepseek("tool calls begin") + "nothing", Parsed(_deepseek("tool calls begin") + "nothing")),
        (deepseek(("ping", "")), Parsed(calls=(("ping", "{}"),))),
        (deepseek(PARIS).partition("Par")[0], Parsed(calls=(("get_weather", '{"city": "'),))),
    ],
    "deepseek_v31": [
        (deepseek(("ping", ""), version="v31"), Parsed(calls=(("ping", "{}"),))),
        (deepseek(("pong", "{}"), version="v31"), Parsed(deepseek(("pong", "{}"), version="v31"))),
    ],
    "mistral": [
        ("[TOOL_CALLS] nothing", Parsed("[TOOL_CALLS] nothing")),
        ("[TOOL_CALLS][1, 2]", Parsed("[TOOL_CALLS][1, 2]")),
        ('[TOOL_CALLS]ping[ARGS]{"a": ', Parsed(calls=(("ping", "{"),))),
        ("[TOOL_CALLS]ping[ARGS]", Parsed(calls=(("ping", "{}"),))),
        ('[TOOL_CALLS]pong[ARGS]{"a": 1}', Parsed('[TOOL_CALLS]pong[ARGS]{"a": 1}')),
        (
            '[TOOL_CALLS][{"name": "ping"}, {"name": "pong"}] x',
            Parsed(', {"name": "pong"}] x', calls=(("ping", "{}"),)),
        ),
    ],
    "granite": [
        ('<|tool_call|>[{"name": "pong"}]', Parsed('<|tool_call|>[{"name": "pong"}]')),
        ('[{"name": "ping"', Parsed(calls=(("ping", ""),))),
    ],
    "pythonic": [
        ("[pong()]", Parsed("[pong()]")),
        ("[ping(open('x'))]", Parsed("[ping(open('x'))]")),
        ("[ping(a=__import__('os'))]", Parsed("[ping(a=__import__('os'))]")),
        ("[ping(a=1), pong()]", Parsed(", pong()]", calls=(("ping", '{"a": 1}'),))),
        ("<|python_start|>[ping(a='b", Parsed("<|python_start|>[ping(a='b")),
    ],
    "llama3_json": [
        ('{"name": "ping", "parameters": {"a"', Parsed(calls=(("ping", "{"),))),
        ("{{{{", Parsed("{{{{")),
        ("<|python_tag|>print(1)", Parsed("<|python_tag|>print(1)")),
    ],
    "gpt-oss": [
        ("<|channel|>ana", Parsed()),
        (harmony(_TO_WEATHER, '{"city": "Par', ""), Parsed(calls=(("get_weather", '{"city": "Par'),))),
        (harmony(_TO_WEATHER, "Paris", "<|call|>"), Parsed(calls=(("get_weather", "{}"),))),
        (harmony("commentary to=functions.ping <|constrain|>json", "", "<|call|>"), Parsed(calls=(("ping", "{}"),))),
        (harmony("commentary to=functions.ping <|constrain|>json", "", ""), Parsed(calls=(("ping", "{}"),))),
        (harmony("commentary to=functions.pong", "{}", "<|call|>"), Parsed("{}")),
        ("<|channel|>final<|end|>lost?", Parsed("<|channel|>final<|end|>lost?")),
        ("<|channel|><|channel|>analysis<|message|>x", Parsed(reasoning="x")),
    ],
}
