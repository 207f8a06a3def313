"""`moestro chat`, without a terminal, and on one."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from support.running import MOESTRO, PATIENCE_S, call, run_command

from moestro.cli import main
from moestro.errors import RequestError
from moestro.offline.terminal_chat import AnswerTimes, Conversation, ShownText

LIMITS = ("--max-tokens", "8", "--temperature", "0")


def on_terminal(inner: int) -> None:
    """Make this process the foreground of a terminal, as a shell does."""
    os.login_tty(inner)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def chat(lines: str | bytes, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_command([MOESTRO, "chat", *flags], stdin=lines)


def answer_of(server, *messages: tuple[str, str]) -> str:
    """What the server answers."""
    fields = {"messages": [{"role": role, "content": text} for role, text in messages], "temperature": 0}
    return call(server, "POST", "/v1/chat/completions", fields | {"max_tokens": 8}).json["choices"][0]["message"][
        "content"
    ]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
def test_piped_lines_may_begin_with_a_byte_order_mark(server, encoding):
    done = chat("Write é.\r\n/what\r\n".encode(encoding), "--url", server.url, *LIMITS)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.replace("\r", "")
    assert shown.startswith(answer_of(server, ("user", "Write é.")) + "\n[")
    assert shown.endswith("unknown command /what: /help shows all\n")


def test_a_piped_command_may_begin_with_a_byte_order_mark(server):
    done = chat(b"\xef\xbb\xbf/exit\nWrite.\n", "--url", server.url, *LIMITS)
    assert (done.returncode, done.stdout) == (0, "")


def test_piped_bytes_that_are_no_text_are_refused(server):
    done = chat(b"Write.\n\xff\xfa\xc3\n", "--url", server.url, *LIMITS)
    assert done.returncode == 2
    assert done.stderr.startswith("moestro: standard input is no text in UTF-8 or UTF-16: ")


def test_a_piped_line_is_answered_before_the_next_one_comes(server):
    command = [MOESTRO, "chat", "--url", server.url, *LIMITS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            process.stdin.write(b"/what\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"unknown command /what: /help shows all\n"
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_a_chat_over_pipes_says_what_the_server_says_and_obeys_commands(server):
    lines = "Write f.\nNow g.\n/reset\nNow g.\n/system Be brief.\nNow g.\n/what\n\n/exit\nnever read\n"
    done = chat(lines, "--url", server.url, *LIMITS)
    assert done.returncode == 0, done.stderr
    first = answer_of(server, ("user", "Write f."))
    second = answer_of(server, ("user", "Write f."), ("assistant", first), ("user", "Now g."))
    third = answer_of(server, ("user", "Now g."))
    fourth = answer_of(server, ("system", "Be brief."), ("user", "Now g."))
    shown = re.sub(r"\[\d+ tokens, the first after [\d.]+ s.*\]", "TIMES", done.stdout)
    assert shown == (
        f"{first}\nTIMES\n{second}\nTIMES\nthe chat is forgotten\n{third}\nTIMES\nthe system message is set\n"
        f"{fourth}\nTIMES\nunknown command /what: /help shows all\n"
    )


def test_a_refused_message_is_forgotten(server):
    done = chat(f"{'x ' * 20_000}\nWrite f.\n", "--url", server.url, "--system", "Be brief.", *LIMITS)
    assert done.returncode == 0
    assert "error: This model's maximum context length" in done.stdout
    assert answer_of(server, ("system", "Be brief."), ("user", "Write f.")) in done.stdout


def test_a_model_is_started_for_the_chat():
    done = chat("hi\n", "--model", "qwen3-30b-a3b", "--device", "paced:h20", "--paced-arithmetic", "none", *LIMITS)
    assert done.returncode == 0, done.stderr
    assert "[8 tokens, the first after" in done.stdout
    assert "cut off" in done.stdout


def test_without_a_server_the_command_says_so(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--url", "http://127.0.0.1:9"])
    assert ended.value.code == 2
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err


def test_on_a_terminal_an_interrupt_ends_an_answer_and_not_the_chat(server):
    terminal, inner = pty.openpty()
    process = subprocess.Popen(
        [MOESTRO, "chat", "--url", server.url, "--max-tokens", "1900"],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        preexec_fn=lambda: on_terminal(inner),  # noqa: PLW1509 only so does Ctrl-C reach the process
    )
    os.close(inner)
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + 60
        while text not in shown:
            assert time.monotonic() < deadline, shown
            shown += os.read(terminal, 4096)
        shown = shown.partition(text)[2]

    try:
        until(b">>> ")
        os.write(terminal, b"Write a long story.\n")
        until(b"story.")
        until(b" ")
        os.write(terminal, b"\x03")
        until(b"interrupted")
        until(b">>> ")
        os.write(terminal, b"/exit\n")
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


class FakeClient:
    """Answers with the given deltas, then with an error if there is one."""

    def __init__(self, deltas: Sequence[dict[str, Any]], error: BaseException | None = None) -> None:
        self.deltas, self.error, self.bodies = deltas, error, []

    async def stream(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        self.bodies.append(msgspec.json.decode(body))
        for delta in self.deltas:
            yield msgspec.json.encode({"choices": [{"delta": delta}]})
        if self.error is not None:
            raise self.error
        yield msgspec.json.encode({"choices": [], "usage": {"completion_tokens": 3}})


def answered(conversation: Conversation, client: Any) -> list[ShownText]:
    shown: list[ShownText] = []
    asyncio.run(conversation.answer(client, "hi", shown.append))
    return shown


def test_reasoning_is_shown_and_not_sent_back():
    conversation = Conversation({"model": "m"}, system="s")
    client = FakeClient([{"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"content": "yes"}])
    assert answered(conversation, client) == [ShownText("hm", is_reasoning=True), ShownText("yes")]
    answered(conversation, client)
    system, user, reply = ({"role": "system", "content": "s"}, {"role": "user", "content": "hi"},
                           {"role": "assistant", "content": "yes"})  # fmt: skip
    assert [body["messages"] for body in client.bodies] == [[system, user], [system, user, reply, user]]


def test_an_error_leaves_the_chat_as_it_was_and_an_interrupt_keeps_what_was_shown():
    conversation = Conversation()
    with pytest.raises(RequestError):
        answered(conversation, FakeClient([{"content": "begun"}], RequestError("no")))
    assert conversation.turns == []
    with pytest.raises(asyncio.CancelledError):
        answered(conversation, FakeClient([{"content": "begun"}], asyncio.CancelledError()))
    assert [turn["content"] for turn in conversation.turns] == ["hi", "begun"]


def test_times_in_words():
    assert str(AnswerTimes(1, 0.5, 0.0, "stop")) == "1 tokens, the first after 0.50 s"
    assert str(AnswerTimes(11, 0.5, 2.0, "stop")) == "11 tokens, the first after 0.50 s, then 5.0 tokens/s"
