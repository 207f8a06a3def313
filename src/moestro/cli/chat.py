"""`moestro chat`: a chat on the terminal."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from moestro.cli.app import app


@app.command
def chat(
    *serve_flags: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    url: Annotated[str | None, Parameter(name=("--url", "--base-url"))] = None,
    api_key: Annotated[str | None, Parameter(show_default=False)] = None,
    model_name: str | None = None,
    system_prompt: Annotated[str, Parameter(name=("--system-prompt", "--system"))] = "",
    max_tokens: int | None = None,
    temperature: float | None = None,
) -> None:
    """Chat with a model on the terminal: with one that is started, or with a running server.

    Further flags are those of moestro serve, and start a model for the chat: --model, --dtype, --engines and others.
    In the chat, /reset forgets it, /system TEXT sets the system message, and /exit ends.

    * moestro chat --model moestro-demo
    * moestro chat --url http://127.0.0.1:8000 talks to moestro serve, moestro route or any server with OpenAI's API.

    Parameters
    ----------
    url
        Address of a running server, with or without /v1. Unset: a model is started.
    api_key
        Key of the running server. MOESTRO_API_KEY keeps it out of the process list.
    model_name
        Name of the model on the server; unset: the first that /v1/models lists.
    system_prompt
        Text of the system message.
    max_tokens
        Most tokens of an answer; unset: as many as the context has room for.
    temperature
        Sharpness of the distribution; unset: the server's default.
    """
    from rich.console import Console

    from moestro.offline.server import any_server
    from moestro.offline.terminal_chat import Conversation, TerminalChat, first_model, line_reader

    given = {"max_tokens": max_tokens, "temperature": temperature}
    fields = {name: value for name, value in given.items() if value is not None}
    with any_server(url, api_key, serve_flags) as server:
        conversation = Conversation(fields | {"model": model_name or first_model(server)}, system_prompt)
        TerminalChat(server, conversation, line_reader(), Console(soft_wrap=True)).run()
