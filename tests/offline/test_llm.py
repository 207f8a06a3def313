"""`moestro.LLM` with the demo model: the same tokens as the server's, in the form of vLLM's answers."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from support.running import EXACT, call, has_ended, ranks_of, wait_until

from moestro import LLM, SamplingParams
from moestro.errors import ConfigError, EngineDiedError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = [f"def {name}_{number}(" for number in range(10) for name in ("add", "parse", "find", "sort", "load")]
CHAT = [{"role": "user", "content": "Write a Python function `add`."}]
PACED = {"model": "qwen3-30b-a3b", "device": "paced:h20", "paced_arithmetic": "none"}  # It starts without torch.


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a shell; a job that a script started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    exact = {"kernels": "own"} if "own" in EXACT else {"dtype": "float32"}
    with LLM(**exact, kv_cache_memory_bytes=100_000_000) as llm:
        processes = ranks_of(llm._server.process_id)
        yield llm
    assert psutil.wait_procs(processes, timeout=30)[1] == []


def reply_of(server, path: str, **fields: object) -> dict:
    answer = call(server, "POST", path, fields | {"return_token_ids": True})
    assert answer.status == 200, answer.body
    return answer.json


def test_fifty_prompts_get_the_tokens_of_the_server_in_their_order(llm, server):
    outputs = llm.generate(PROMPTS, GREEDY)
    choices = reply_of(server, "/v1/completions", prompt=PROMPTS, temperature=0, max_tokens=8)["choices"]
    assert [output.prompt for output in outputs] == PROMPTS
    assert [output.prompt_token_ids for output in outputs] == [choice["prompt_token_ids"] for choice in choices]
    assert [output.outputs[0].token_ids for output in outputs] == [choice["token_ids"] for choice in choices]
    assert [output.outputs[0].text for output in outputs] == [choice["text"] for choice in choices]
    assert {output.outputs[0].finish_reason for output in outputs} <= {"length", "stop"}


def test_parameters_of_each_prompt_have_the_effect_that_they_have_at_the_server(llm, server):
    given = [
        {"seed": 7, "temperature": 1.0, "top_p": 0.9, "top_k": 50, "max_tokens": 6},
        {"seed": 8, "n": 2, "max_tokens": 5, "frequency_penalty": 0.5, "logit_bias": {300: 5.0}},
        {"temperature": 0, "max_tokens": 20, "stop": ["\n"], "include_stop_str_in_output": True},
        {"temperature": 0, "max_tokens": 12, "structured_outputs": {"choice": ["yes", "no"]}},
    ]
    outputs = llm.generate([PROMPTS[0]] * 4, [SamplingParams(**each) for each in given])
    for output, fields in zip(outputs, given, strict=True):
        choices = reply_of(server, "/v1/completions", prompt=PROMPTS[0], **fields)["choices"]
        shown = [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in output.outputs]
        names = ("token_ids", "text", "finish_reason", "stop_reason")
        assert shown == [tuple(choice[name] for name in names) for choice in choices]
    assert outputs[3].outputs[0].text in {"yes", "no"}


def test_token_ids_and_dictionaries_are_prompts(llm):
    text = llm.generate(PROMPTS[0], GREEDY)[0]
    ids = text.prompt_token_ids
    same = [*llm.generate(ids, GREEDY), *llm.generate([{"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}], GREEDY)]
    assert [each.outputs[0].token_ids for each in same] == [text.outputs[0].token_ids] * 3
    assert [each.prompt for each in same] == [None, PROMPTS[0], None]
    assert llm.generate([]) == []


def test_logprobs_name_tokens_by_id(llm, server):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    output = llm.generate(PROMPTS[0], params)[0]
    answer, choice = output.outputs[0], reply_of(
        server, "/v1/completions", prompt=PROMPTS[0], temperature=0, max_tokens=6, logprobs=3
    )["choices"][0]  # fmt: skip
    expected = choice["logprobs"]
    assert answer.logprobs is not None
    for entry, token_id, logprob, text in zip(
        answer.logprobs, answer.token_ids, expected["token_logprobs"], expected["tokens"], strict=True
    ):
        assert next(iter(entry)) == token_id
        assert (entry[token_id].logprob, entry[token_id].decoded_token, entry[token_id].rank) == (logprob, text, 1)
        assert len(entry) == 3
    assert answer.cumulative_logprob == pytest.approx(math.fsum(expected["token_logprobs"]))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry] == output.prompt_token_ids[1:]


def test_a_chat_gets_the_tokens_of_the_server(llm, server):
    expected = reply_of(server, "/v1/chat/completions", messages=CHAT, temperature=0, max_tokens=8)
    (output,) = llm.chat(CHAT, GREEDY)
    assert output.prompt_token_ids == expected["prompt_token_ids"]
    assert output.outputs[0].token_ids == expected["choices"][0]["token_ids"]
    assert output.prompt is not None
    assert CHAT[0]["content"] in output.prompt
    assert output.prompt.endswith("assistant\n")
    begun = [*CHAT, {"role": "assistant", "content": "def add("}]
    outputs = llm.chat([CHAT, begun], GREEDY, add_generation_prompt=False, continue_final_message=False)
    assert [len(each.outputs) for each in outputs] == [1, 1]


def test_without_a_limit_an_answer_fills_the_context(llm):
    ids = llm.generate(PROMPTS[0], GREEDY)[0].prompt_token_ids * 500
    prompt = ids[: llm.max_model_len - 5]
    unlimited = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([prompt], unlimited)
    assert len(output.outputs[0].token_ids) == 5
    with pytest.raises(RequestError, match="maximum context length"):
        llm.generate([prompt + ids[:10]], unlimited)


def test_an_invalid_prompt_names_itself_and_the_next_call_works(llm):
    with pytest.raises(RequestError, match="temperature must be") as refused:
        llm.generate(PROMPTS[:3], [GREEDY, SamplingParams(temperature=-3), GREEDY])
    assert refused.value.param == "temperature"
    assert "prompt number 1" in refused.value.__notes__[0]
    with pytest.raises(RequestError, match="3 prompts need as many sampling_params"):
        llm.generate(PROMPTS[:3], [GREEDY])
    for prompts in ([None], None, 5):
        with pytest.raises(RequestError, match="a prompt is a text"):
            llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="a prompt has no token ids"):
        llm.generate([{"prompt_token_ids": []}])
    assert len(llm.generate(PROMPTS[:2], GREEDY)) == 2


def test_it_works_where_an_event_loop_runs(llm):
    async def cell() -> list:
        return llm.generate(PROMPTS[:2], GREEDY)

    assert len(asyncio.run(cell())) == 2


def test_prompts_survive_the_end_of_their_engine(llm):
    prompts = PROMPTS[:20]
    before = llm.generate(prompts, GREEDY)
    engine = ranks_of(llm._server.process_id)[0]
    threading.Timer(0.1, engine.kill).start()
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    engine.wait(300)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [64] * len(prompts)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == [
        output.outputs[0].token_ids for output in before
    ]


def test_a_closed_or_killed_model_says_so():
    llm = LLM(**PACED)
    assert len(llm.generate(["x"] * 3)) == 3
    os.kill(llm._server.process_id, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="the server ended with status -9"):
        llm.generate("x")
    llm.close()
    llm.close()
    with pytest.raises(EngineDiedError, match="is closed"):
        llm.generate("x")


def test_the_processes_end_with_a_program_that_is_killed():
    code = f"from moestro import LLM; llm = LLM(**{PACED}); print(llm._server.process_id, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        server = psutil.Process(int(program.stdout.readline()))
        processes = [server, *server.children(recursive=True)]
        assert len(processes) > 1
        program.kill()
    wait_until(lambda: all(map(has_ended, processes)))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"no_such_setting": 3}, "no-such-setting"),
        ({"max_num_seqs": 0}, "max-num-seqs"),
        ({"tensor_parallel_size": 2}, "is a flag of vLLM"),
        ({"port": 8000}, "not for a server that is started here"),
        ({"api_key": ["x"]}, "not for a server that is started here"),
        ({"model": "/no/such/checkpoint"}, "/no/such/checkpoint"),
    ],
)
def test_settings_that_cannot_be_honoured_raise_with_the_reason(settings, text):
    with pytest.raises(ConfigError, match=text):
        LLM(**PACED | settings)


def test_an_import_of_moestro_loads_nothing():
    code = "import sys; before = set(sys.modules); import moestro; print(*sorted(set(sys.modules) - before))"
    code += "; assert {'LLM', 'SamplingParams'} <= set(dir(moestro)); assert not hasattr(moestro, 'nothing')"
    code += "; moestro.LLM; moestro.SamplingParams; assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded - sys.stdlib_module_names == {"moestro"}
    assert not {"asyncio", "ctypes", "subprocess"} & loaded


def test_the_interrupt_of_a_long_call_leaves_the_model_usable(heeds_interrupts):
    with LLM(**PACED) as llm:
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        long = SamplingParams(max_tokens=30_000, ignore_eos=True)
        began_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["x"] * 4, long)
        assert time.monotonic() - began_s < 300, "the whole answer takes longer"
        assert len(llm.generate("x")) == 1
