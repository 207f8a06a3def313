"""A chat template is the checkpoint's program: whatever it does, the server answers in time and within its memory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import NAME
from support import template_server
from support.running import PATIENCE_S, Running, call, chat, complete, has_ended, wait_until
from support.template_server import LIMIT_S
from transformers import PreTrainedTokenizerFast

from moestro.errors import RequestError
from moestro.text.chats.chat_template import MEMORY_LIMIT_BYTES
from moestro.text.tokenizer import TemplateOptions, Tokenizer

SERVER = (sys.executable, template_server.__file__)
# What a chat's first message makes the template do.
TEMPLATE = """
{%- set first = messages[0]['content'] -%}
{%- if first == 'loop' -%}
  {%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- for c in range(99999) -%}
  {%- endfor -%}{%- endfor -%}{%- endfor -%}
{%- elif first == 'memory' -%}{{- ('a' * 10 ** 10) | length -}}
{%- elif first == 'text' -%}{{- 'a' * (first | length * 20000000) -}}
{%- elif first == 'prompt' -%}{{- 'a' * (first | length * 200000) -}}
{%- elif first == 'refuse' -%}{{- raise_exception('no ' * 100000) -}}
{%- endif -%}
{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] -}}{%- endfor -%}
"""


@pytest.fixture(scope="module")
def command(demo_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("template") / "checkpoint"
    shutil.copytree(demo_dir, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return (*SERVER, str(directory), "--served-model-name", NAME)


@pytest.fixture(scope="module")
def templated(command, tmp_path_factory):
    running = Running(command, tmp_path_factory.mktemp("templated"))
    yield running
    running.kill()


def code_of(reply) -> tuple[int, str | None]:
    return reply.status, reply.json["error"]["code"]


def test_a_template_without_end_is_a_400_in_bounded_time_and_others_are_served_meanwhile(templated):
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(chat, templated, "loop")
        wait_until(lambda: len(templated.renderers()) == 1 and templated.renderers()[0].cpu_times().user > 0)
        assert chat(templated, "hi", max_tokens=2).status == 200
        assert complete(templated, max_tokens=2).status == 200
        assert not endless.done()
        reply = endless.result()
    assert code_of(reply) == (400, "chat_template_limit")
    assert f"takes more than {LIMIT_S:g} s" in reply.json["error"]["message"]
    assert chat(templated, "hi", max_tokens=2).status == 200


def test_chats_without_end_hold_up_no_completion(templated):
    with ThreadPoolExecutor(4) as pool:  # as many as there are threads that prepare chats, or more
        endless = [pool.submit(chat, templated, "loop") for _ in range(4)]
        wait_until(lambda: any(each.cpu_times().user > 0.1 for each in templated.renderers()))
        assert complete(templated, max_tokens=2).status == 200
        assert not any(each.done() for each in endless)

        def are_over() -> bool:
            """End renderings that have run for a while; their limit of time would end them after more of a CPU."""
            for each in templated.renderers():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if each.cpu_times().user > 0.5:
                        each.kill()
            return all(each.done() for each in endless)

        wait_until(are_over)
        assert {code_of(each.result()) for each in endless} == {(400, "chat_template_limit")}


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("memory", "chat_template_limit", "takes more than 1024 MiB of memory"),
        ("text", "chat_template_limit", "takes more than 64 MiB of text"),
        ("prompt", "context_length_exceeded", "your prompt contains 1200"),
    ],
)
def test_a_template_that_explodes_is_a_400_and_takes_bounded_memory(text, code, words, templated):
    reply = chat(templated, text)
    assert code_of(reply) == (400, code)
    assert words in reply.json["error"]["message"]
    for process in (psutil.Process(templated.process.pid), *templated.renderers()):
        status = Path(f"/proc/{process.pid}/status").read_text()
        [peak_kib] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
        assert peak_kib * 1024 < MEMORY_LIMIT_BYTES
    assert call(templated, "POST", "/tokenize", {"messages": [{"role": "user", "content": text}]}).status == 400
    assert chat(templated, "hi", max_tokens=2).status == 200


def test_what_a_template_says_against_messages_is_shown_shortened(templated):
    reply = chat(templated, "refuse")
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith("The model's chat template refuses these messages: no no no")
    assert len(reply.body) < 1000


def test_a_killed_renderer_is_replaced_silently(templated):
    chat(templated, "hi", max_tokens=2)
    for renderer in templated.renderers():
        renderer.kill()
        wait_until(lambda renderer=renderer: has_ended(renderer))
    assert chat(templated, "hi", max_tokens=2).status == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_renderer_outlives_the_server_even_in_the_middle_of_a_loop(number, command, tmp_path):
    server = Running(command, tmp_path)
    try:
        with ThreadPoolExecutor(2) as pool:
            pool.submit(chat, server, "loop")
            wait_until(lambda: server.renderers() and server.renderers()[0].cpu_times().user > 0.3)
            pool.submit(chat, server, "hi")
            wait_until(lambda: len(server.renderers()) == 2)
            processes = server.processes()
            os.kill(server.process.pid, number)
            server.process.wait(PATIENCE_S)
        wait_until(lambda: all(has_ended(each) for each in processes))  # an orphan may stay a zombie
    finally:
        server.kill()


# --- the text itself

CHATS = {
    "plain": ([{"role": "user", "content": "hi \U0001f600"}], None),
    "tools": ([{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "f", "b": [1, None]}}]),
    "turns": ([{"role": role, "content": role} for role in ("system", "user", "assistant", "user")], None),
}
FEATURES = """{{- bos_token }}{% generation %}{{ messages | tojson(indent=2) }}{% endgeneration %}
{%- if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}
    {{- m['content'] | trim }}{% endfor %}{{ strftime_now('%Y') | length }}
{% if add_generation_prompt %}{{ eos_token }}{% endif %}"""


@pytest.mark.parametrize("name", CHATS)
def test_the_text_is_what_transformers_renders(name, demo_dir, tmp_path):
    directory = shutil.copytree(demo_dir, tmp_path / "checkpoint")
    (directory / "chat_template.jinja").write_text(FEATURES)
    (messages, tools), ours = CHATS[name], Tokenizer(directory)
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    for adds in (True, False):
        assert ours.render_chat(
            messages, tools=tools, options=TemplateOptions(add_generation_prompt=adds)
        ) == theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=adds)
    ours.close()


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**4299, 1.5e308, -0.0, {"": {"\0": [None]}}, "\ud7ff"])
def test_a_variable_of_any_json_reaches_the_template(tokenizer, value):
    options = TemplateOptions(variables={"given": value}, template="{{ given | tojson }}")
    assert json.loads(tokenizer.render_chat([{"role": "user", "content": "hi"}], options=options)) == value


def test_a_closed_tokenizer_renders_nothing_more_and_leaves_no_process(demo_dir):
    tokenizer = Tokenizer(demo_dir)
    before = psutil.Process().children()
    tokenizer.render_chat([{"role": "user", "content": "hi"}])
    [renderer] = set(psutil.Process().children()) - set(before)
    tokenizer.close()
    assert not renderer.is_running()
    with pytest.raises(RequestError, match="shutting down"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
