"""Tools of OpenAI's `/v1/responses`, offered as functions of a chat, and the calls of these functions translated back.

A chat knows functions only. Functions inside a `namespace` get a name with the namespace before theirs. A `custom`
tool takes free text, so its function takes one string. Tools that OpenAI's servers run are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from moestro.errors import RequestError, shown
from moestro.web.adapters.field_places import FieldPlaces

# Tools that OpenAI's servers run, which clients offer whether or not a server has them. Names may go on with a date.
HOSTED = ("web_search", "image_generation", "tool_search")
_FREE_TEXT = "input"  # The only argument of a custom tool's function.
_SEPARATOR = "__"  # Between a namespace and a name; several clients join the names of servers and tools by it.


class ToolFormat(msgspec.Struct):
    """Form of a custom tool's input."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class FunctionTool(msgspec.Struct):
    """One tool of the client: a function, a custom tool, or a namespace of these."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    strict: bool | None = None
    format: ToolFormat | None = None
    tools: list[FunctionTool] | None = None


class ToolReference(msgspec.Struct):
    """A tool by its kind and name."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ChoiceField(msgspec.Struct):
    """A tool that the model has to call, or the tools among which it may choose."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[ToolReference] | None = None


@dataclass(frozen=True, slots=True)
class CalledTool:
    """The client's tool behind a function of the chat."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def function_name(name: str | None, namespace: str | None) -> str | None:
    """Return the name of the chat's function for a tool."""
    if not namespace or name is None:
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


class OfferedTools:
    """Functions of a chat, with the client's tools behind them.

    Attributes:
        functions: Tools of the chat's body.
        left_out: Places of tools that are not offered, each with its type, and of grammars that are only described.
    """

    def __init__(self, places: FieldPlaces) -> None:
        self._places = places
        self._tools: dict[str, CalledTool] = {}
        self.functions: list[dict[str, Any]] = []
        self.left_out: list[str] = []

    def offer(self, place: str, tool: FunctionTool, namespace: str | None = None) -> None:
        """Add a tool of the client.

        Raises:
            RequestError: The tool is of an unknown type, or another one gives a function of the same name.
        """
        match tool.type:
            case "function" | "custom":
                self._add(place, tool, namespace)
            case "namespace" if namespace is None:
                for i, inner in enumerate(tool.tools or ()):
                    self.offer(f"{place}.tools[{i}]", inner, tool.name)
            case kind if kind.startswith(HOSTED):
                self.left_out.append(f"{place} ({kind})")
            case _:
                text = f"tools of type {shown(tool.type)} are not supported; send function, custom or namespace"
                raise unsupported(f"{place}.type", text)

    def called(self, function: str) -> CalledTool:
        """Return the client's tool that a call of a function means."""
        return self._tools.get(function) or CalledTool(function)

    def only(self, wanted: list[ToolReference]) -> None:
        """Keep the tools to which the request limits its choice.

        Raises:
            RequestError: There are none, or a tool is not offered or has no name.
        """
        if not wanted:
            raise invalid("tool_choice.tools", 'is empty; name tools, or send the choice "none"')
        offered = [each for each in wanted if not each.type.startswith(HOSTED)]
        if unnamed := next((each.type for each in offered if each.name is None), None):
            raise unsupported("tool_choice.tools", f"a function or a custom tool has a name, got type {shown(unnamed)}")
        names = {function_name(each.name, each.namespace) for each in offered}
        if missing := sorted(str(name) for name in names if name not in self._tools):
            raise invalid("tool_choice.tools", f"names the tool {shown(missing[0])}, which is not in tools")
        self.functions = [each for each in self.functions if each["function"]["name"] in names]

    def _add(self, place: str, tool: FunctionTool, namespace: str | None) -> None:
        name = function_name(tool.name, namespace)
        own = f"tools[{len(self.functions)}]"
        self._places.add(own, place)
        self._places.add(f"{own}.function", place)
        if not tool.name or name is None:
            raise RequestError(f"{place}.name is missing; send a name.", param=f"{place}.name", code="invalid_value")
        if name in self._tools:
            raise invalid(f"{place}.name", f"is the name of two tools: {shown(name)}")
        self._tools[name] = CalledTool(tool.name, namespace, is_custom=tool.type == "custom")
        function = {"name": name, "description": tool.description, "strict": tool.strict}
        function |= _free_text(tool) if tool.type == "custom" else _parameters(tool)
        if tool.format is not None and tool.format.definition:
            self.left_out.append(f"{place}.format")  # Described, and not enforced.
        given = {key: value for key, value in function.items() if value is not None}
        self.functions.append({"type": "function", "function": given})


def _parameters(tool: FunctionTool) -> dict[str, Any]:
    return {} if bytes(tool.parameters) == b"null" else {"parameters": tool.parameters}


def _free_text(tool: FunctionTool) -> dict[str, Any]:
    """Return description and parameters of the function for a custom tool; its grammar is described, not enforced."""
    form, rules = tool.format, ""
    if form is not None and form.definition:
        rules = f"\n\nThe input follows this {form.syntax or 'lark'} grammar:\n{form.definition}"
    text = {"type": "string", "description": "The whole input of the tool, as plain text."}
    schema = {"type": "object", "properties": {_FREE_TEXT: text}, "required": [_FREE_TEXT]}
    return {"description": f"{tool.description or ''}{rules}" or None, "parameters": schema}


def arguments_of_text(text: str | None) -> str:
    """Return the arguments of the function for a custom tool that was called with `text`."""
    return msgspec.json.encode({_FREE_TEXT: text or ""}).decode()


def text_of_arguments(arguments: str) -> str:
    """Return the input of a custom tool from its function's arguments; text of another form is the input itself."""
    try:
        found = msgspec.json.decode(arguments, type=dict[str, Any]).get(_FREE_TEXT)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found if isinstance(found, str) else arguments


def choice_of(choice: str | ChoiceField | None, offered: OfferedTools) -> object:
    """Return the chat's choice of tools; a list of allowed ones limits what is offered.

    Raises:
        RequestError: The choice is of an unknown type, or names no tool.
    """
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        if choice.mode not in (None, "auto", "required"):
            raise invalid("tool_choice.mode", f'must be "auto" or "required", got {shown(choice.mode)}')
        offered.only(choice.tools or [])
        return choice.mode or "auto"
    if choice.type not in ("function", "custom"):
        text = f"only a function or a custom tool can be chosen, got type {shown(choice.type)}"
        raise unsupported("tool_choice", text)
    if choice.name is None:
        raise RequestError("tool_choice.name is missing; send a name.", param="tool_choice.name", code="invalid_value")
    return {"type": "function", "function": {"name": function_name(choice.name, choice.namespace)}}


def invalid(param: str, text: str) -> RequestError:
    """Return the error for an invalid value of a field."""
    return RequestError(f"{param} {text}.", param=param, code="invalid_value")


def unsupported(param: str, text: str) -> RequestError:
    """Return the error for a value that this server does not support."""
    return RequestError(f"{param}: {text}.", param=param, code="unsupported_parameter")
