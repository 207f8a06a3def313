"""`moestro serve --device paced:h20`: real processes, modelled durations."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.fake_device import KvDevice, make_request
from support.running import PATIENCE_S, REAL, Running, call, complete, is_idle, load, wait_until

from moestro.cli import main
from moestro.config.launch_spec import LaunchSpec
from moestro.config.serve_settings import ServeSettings, with_derived
from moestro.core.request import ServiceClass
from moestro.core.work import Forward, request_key
from moestro.cost.gpus import H20, kv_blocks
from moestro.cost.model import Batch, PopularityForm
from moestro.cost.networks import CONFIGS, network_named
from moestro.cost.priced_device import PricedStages, whole_setup
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.settings import PacedSettings, overridden_popularity
from moestro.cost.tables import in_4_bits
from moestro.engine.rank import Rank, build_preemptive_rank, build_rank
from moestro.engine.settings import SchedulerOptions, SchedulerSettings
from moestro.errors import ConfigError
from moestro.flow.policies.qllm import ExpertLevelPreemption
from moestro.flow.settings import SteppingSettings
from moestro.model.settings import ModelSettings
from moestro.worker.paced import (
    WORDS,
    FixedAnswers,
    NetworkAnswers,
    PacedDevice,
    make_paced_rank,
    num_blocks_of,
    num_parameters,
    paced_gate,
    paced_info,
    read_words,
    stage_cost_of,
)
from moestro.workload.traces.request_record import read_request_record

COST = Roofline(RooflineSettings(network=network_named("qwen3-30b-a3b"), gpu=H20))
BOUNDS = SchedulerSettings(num_blocks=64, block_size=4, max_model_len=64)
DECODE_S = COST.step_ns(Batch(np.array([20]), np.array([1]))) / 1e9


@pytest.fixture(scope="module", params=[("none", "fused"), ("demo", "fused"), ("demo", "preemptive")], ids=" ".join)
def paced(request, tmp_path_factory):
    arithmetic, mode = request.param
    flags = ("--device", "paced:h20", "--paced-arithmetic", arithmetic, "--engines", "2", "--dtype", "float32")
    flags += ("--mode", mode)
    flags += ("--num-gpu-blocks-override", "2000")  # the demo network allocates them
    server = Running((*REAL, *flags), tmp_path_factory.mktemp("paced"), forked=arithmetic == "demo")
    server.arithmetic = arithmetic
    yield server
    try:
        assert server.stop() == 0
    finally:
        server.kill()


def test_an_answer_takes_as_long_as_on_the_device_that_is_played(paced):
    complete(paced, max_tokens=1)  # whatever happens once
    began = time.monotonic()
    answer = complete(paced, max_tokens=21, ignore_eos=True)
    took = time.monotonic() - began
    assert answer.status == 200
    assert answer.json["usage"]["completion_tokens"] == 21
    assert answer.json["model"] == "qwen3-30b-a3b"
    assert took > 21 * DECODE_S * 0.95
    assert "paced:h20" in paced.text


def test_the_same_prompt_has_the_same_answer_and_its_prefix_is_found(paced):
    fields = {"prompt": "def f(x):\n    return x\n" * 12, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    first = complete(paced, **fields)
    texts = {complete(paced, **fields).json["choices"][0]["text"] for _ in range(4)}
    assert texts == {first.json["choices"][0]["text"]}
    wait_until(lambda: is_idle(paced))
    assert sum(engine["num_hit_tokens"] for engine in load(paced)) > 0


def test_without_arithmetic_no_process_loads_torch(paced):
    complete(paced, max_tokens=1)
    mapped = [Path(f"/proc/{rank.pid}/maps").read_text() for rank in paced.ranks()]
    assert mapped
    assert all(("libtorch" in maps) == (paced.arithmetic == "demo") for maps in mapped)


def test_a_grammar_is_followed_where_a_network_computes_and_refused_elsewhere(paced):
    reply = complete(paced, guided_regex="[ab]{3}", max_tokens=9)
    if paced.arithmetic == "none":
        assert reply.status == 400
        assert "compute no logits" in reply.json["error"]["message"]
    else:
        assert re.fullmatch("[ab]{3}", reply.json["choices"][0]["text"])


def test_log_probabilities_can_be_requested(paced):
    answer = complete(paced, max_tokens=3, logprobs=1, echo=True, ignore_eos=True)
    assert len(answer.json["choices"][0]["logprobs"]["token_logprobs"]) > 3
    assert call(paced, "GET", "/health").status == 200


def test_a_warning_about_prices_is_logged_once(caplog):
    answered = iter([None, "beyond the table"] + ["and further"] * 9)
    run_rank(PacedDevice(COST, FixedAnswers([10, 11, 12]), warning=lambda: next(answered)), max_tokens=6)
    assert caplog.messages == ["beyond the table"]


def run_rank(device, **sampling):
    """Times and tokens of one request, on a clock that goes from result to result."""
    rank, now_ns, found = build_rank(BOUNDS, device), 0, []
    rank.add(make_request("r", range(5), **sampling), now_ns)
    while rank.has_work:
        outputs = rank.step(now_ns)
        found += [(now_ns, token) for output in outputs for token in output.token_ids]
        ready_ns = rank.ready_at_ns()
        now_ns = now_ns if ready_ns is None else ready_ns
    return found


@pytest.mark.parametrize(
    "answers", [lambda: FixedAnswers([7]), lambda: NetworkAnswers(KvDevice(64, 4))], ids=["fixed", "network"]
)
def test_each_step_ends_at_its_price(answers):
    found = run_rank(PacedDevice(COST, answers()), max_tokens=4)
    prefill = COST.step_ns(Batch(np.array([0]), np.array([5])))
    decodes = [COST.step_ns(Batch(np.array([start]), np.array([1]))) for start in (5, 6, 7)]
    assert [at_ns for at_ns, _ in found] == np.cumsum([prefill, *decodes]).tolist()


def test_in_any_order_a_network_s_tokens_are_passed_on():
    device = KvDevice(64, 4)
    answers = NetworkAnswers(device)
    setup = whole_setup(COST, 128, 16)
    stages = PricedStages(COST, setup, lambda units, now_ns: answers.of(Forward(units), now_ns))
    bounds = replace(BOUNDS, max_num_batched_tokens=256, max_num_urgent_seqs=8)
    policy = ExpertLevelPreemption(max_wait_ns=None, max_merged=0)
    rank, now_ns, answered, ended = build_preemptive_rank(bounds, stages, policy), 0, {}, []
    prompts = {"be": range(30), "ls": range(7, 12)}
    waiting = [(0, "be"), (COST.step_ns(Batch(np.array([0]), np.array([30]))) // 2, "ls")]
    while waiting or rank.has_work:
        if waiting and now_ns >= waiting[0][0]:
            name = waiting.pop(0)[1]
            fields = make_request(name, prompts[name], max_tokens=4)
            rank.add(msgspec.structs.replace(fields, service_class=ServiceClass(name)), now_ns)
        for output in rank.step(now_ns):
            answered.setdefault(output.request_id, []).extend(output.token_ids)
            ended += [output.request_id] if output.finish_reason else []
        at_ns = [ready_ns for ready_ns in (rank.ready_at_ns(), *(when for when, _ in waiting)) if ready_ns is not None]
        now_ns = max(now_ns, min(at_ns, default=now_ns))
    assert ended == ["ls", "be"]
    for name, prompt in prompts.items():
        assert answered[name] == tokens_alone(prompt)


def paced_rank() -> Rank:
    model, paced = ModelSettings(), PacedSettings(device="paced:h20", paced_arithmetic="none")
    spec = LaunchSpec(
        rank=0, launch=0, address="", launched_ns=0, log_level="info", model=model, scheduler=SchedulerOptions(),
        stepping=SteppingSettings(mode="preemptive"), paced=paced,
    )  # fmt: skip
    return make_paced_rank(spec, paced, FixedAnswers([7]), paced_info(paced, model, 100, 1000))


def experts_of(rank: Rank, name: str) -> np.ndarray:
    """Serve one request alone; tokens that each expert computed for it."""
    before = 0 if rank.expert_counts is None else rank.expert_counts.copy()
    rank.add(make_request(name, range(len(name), 20 + len(name)), max_tokens=3), 0)  # no prefix is found again
    now_ns = 0
    while rank.has_work:
        rank.step(now_ns)
        now_ns = max(now_ns, rank.ready_at_ns())
    return rank.expert_counts - before


def test_a_request_visits_the_same_experts_on_every_engine_whatever_these_served_before():
    first, second = paced_rank(), paced_rank()
    experts_of(second, "another")
    assert np.array_equal(experts_of(first, "mine"), experts_of(second, "mine"))
    assert not np.array_equal(experts_of(first, "another"), experts_of(second, "yet another"))


def tokens_alone(prompt) -> list[int]:
    rank, found, now_ns = build_rank(BOUNDS, KvDevice(64, 4)), [], 0
    rank.add(make_request("r", prompt, max_tokens=4), now_ns)
    while rank.has_work:
        found += [token for output in rank.step(now_ns) for token in output.token_ids]
    return found


def test_a_network_s_tokens_are_passed_on():
    plain = [token for _, token in run_rank(KvDevice(64, 4), max_tokens=6)]
    assert [token for _, token in run_rank(PacedDevice(COST, NetworkAnswers(KvDevice(64, 4))), max_tokens=6)] == plain


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": "paced:abacus"}, "no constants for GPU 'abacus'"),
        ({"device": "paced:qllm", "network": "qwen2-7b"}, "networks with experts, and qwen2-7b has none"),
        ({"device": "paced:h20", "network": "gpt-5"}, "no sizes for network 'gpt-5'"),
        ({"device": "paced:h20", "network": __file__}, "test_paced.py is malformed"),
        ({"device": "paced:table.json", "paced_arithmetic": "none"}, "a named GPU and network"),
    ],
)
def test_an_unknown_device_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        PacedSettings(**given)


def test_a_config_json_is_a_network(tmp_path):
    config = {**CONFIGS["mixtral-8x7b-mqa-top1"], "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = PacedSettings(device="paced:h200", network=str(tmp_path), paced_arithmetic="none")
    assert (given.shape.num_layers, given.shape.experts.top_k) == (3, 1)
    info = paced_info(given, ModelSettings(model="demo"), 4096, 77)
    assert (info.num_layers, info.num_experts) == (3, 8)
    whole = replace(given, network="mixtral-8x7b-mqa-top1")
    assert num_blocks_of(given, ModelSettings()) > num_blocks_of(whole, ModelSettings())


def test_every_answer_says_that_it_is_paced(paced):
    answer = complete(paced, max_tokens=17, ignore_eos=True).json
    assert answer["system_fingerprint"].startswith("fp_paced_")
    assert "Evidence is paced" in paced.text
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert (choice["text"] in WORDS * 2) == (paced.arithmetic == "none")


def test_token_ids_are_those_of_the_network_that_the_server_names(paced):
    """The demo network's tokenizer has 4,096 ids; a load generator draws them from the named network's 151,936."""
    num_ids = network_named("qwen3-30b-a3b").vocab_size if paced.arithmetic == "none" else 4096
    answer = complete(paced, prompt=[5, num_ids - 1, 7], max_tokens=3, ignore_eos=True, stop_token_ids=[num_ids - 1])
    assert answer.status == 200, answer.body
    assert answer.json["usage"] == answer.json["usage"] | {"prompt_tokens": 3, "completion_tokens": 3}
    assert answer.json["choices"][0]["text"]
    echoed = complete(paced, prompt=[5, num_ids - 1, 7], max_tokens=1, echo=True, logprobs=1, ignore_eos=True)
    assert echoed.status == 200, echoed.body
    assert len(echoed.json["choices"][0]["logprobs"]["tokens"]) == 4
    refused = complete(paced, prompt=[5, num_ids], max_tokens=3)
    assert refused.status == 400
    assert f"must be between 0 and {num_ids - 1}, got {num_ids}" in refused.json["error"]["message"]


def test_a_tokenizer_larger_than_the_network_keeps_its_ids():
    paced, model = PacedSettings(device="paced:h20", network="mixtral-8x7b"), ModelSettings(model="demo")
    assert paced_info(paced, model, 4096, 77).vocab_size == network_named("mixtral-8x7b").vocab_size
    assert paced_info(paced, model, 200_000, 77).vocab_size == 200_000


def test_fixed_words_are_ordinary_tokens_that_read_as_text(demo_dir, tokenizer):
    words, vocab_size = read_words(demo_dir)
    assert not set(words) & tokenizer.special_ids
    assert max(words) < vocab_size == tokenizer.backend.get_vocab_size()
    assert tokenizer.backend.decode(words * 2) == WORDS * 2


def test_fixed_words_follow_the_position():
    answered = [token for _, token in run_rank(PacedDevice(COST, FixedAnswers([10, 11, 12])), max_tokens=4)]
    assert answered == [12, 10, 11, 12]  # at positions 5, 6, 7, 8


def test_a_tokenizer_that_cannot_be_read_or_has_no_words_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--tokenizer"):
        read_words(tmp_path)
    wordless = '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"\u00e9": 0}, "merges": []}}'
    (tmp_path / "tokenizer.json").write_text(wordless)
    with pytest.raises(ConfigError, match="has no words"):
        read_words(tmp_path)


def test_a_tokenizer_whose_texts_grow_is_refused(demo_dir, tmp_path):
    growing = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000}
    given = json.loads((demo_dir / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(given | {"normalizer": growing}))
    with pytest.raises(ConfigError, match="may make 1e\\+03 characters of one"):
        read_words(tmp_path)


def test_the_kv_cache_is_what_the_gpu_has_beside_the_weights_by_default():
    network, model = network_named("qwen3-30b-a3b"), ModelSettings(model="demo")
    assert num_blocks_of(PacedSettings(device="paced:h20"), model) == kv_blocks(network, H20, 16)
    bytes_of_100 = 100 * 16 * network.kv_bytes_per_token
    holds_100 = ModelSettings(model="demo", kv_cache_memory_bytes=bytes_of_100 + 1)
    assert num_blocks_of(PacedSettings(device="paced:h20"), holds_100) == 100
    qllm = PacedSettings(device="paced:qllm", network="mixtral-8x7b")
    weights = in_4_bits(network_named("mixtral-8x7b")).weight_bytes()
    assert weights == pytest.approx(22.93e9, rel=0.05), "as its paper has it"
    assert num_blocks_of(qllm, model) == int((0.9 * 80 * 2**30 - weights - 6e9) // (16 * 131072))
    few = ModelSettings(model="demo", num_gpu_blocks_override=77)
    assert num_blocks_of(PacedSettings(device="paced:h20"), few) == 77
    assert num_blocks_of(PacedSettings(device="paced:table.json"), model) is None


def test_a_requested_context_is_never_clipped():
    paced, few = PacedSettings(device="paced:h20"), {"model": "demo", "num_gpu_blocks_override": 77}
    assert paced_info(paced, ModelSettings(**few), 4096, 77).max_model_len == 77 * 16
    assert paced_info(paced, ModelSettings(**few, max_model_len=2000), 4096, 77).max_model_len == 2000  # refused later


def test_a_table_of_whole_steps_has_no_prices_for_the_preemptive_mode():
    preemptive = SteppingSettings(mode="preemptive")
    for device in ("paced:h20", "paced:qllm"):
        paced = PacedSettings(device=device, network="mixtral-8x7b")
        ServeSettings(stepping=preemptive, pacing=paced)
    paced = PacedSettings(device="paced:table.json")
    with pytest.raises(ConfigError, match=r"needs prices of stages, and table\.json has prices of whole steps"):
        ServeSettings(stepping=preemptive, pacing=paced)


def test_a_gate_override_replaces_the_popularity_of_a_paced_gpu():
    def popularity(device: str, override: str | None) -> PopularityForm | None:
        model = ModelSettings(device=device, gate_override=override, seed=5)
        paced = with_derived(ServeSettings(model=model), Path, Path).paced
        assert paced is not None
        return paced.popularity

    assert popularity("paced:h20", None) is None
    assert popularity("paced:h20", "uniform") == PopularityForm(family="uniform")
    skewed = PopularityForm(family="exponential", skew=0.5, hot_ids="permuted", seed=5)
    assert popularity("paced:h20", "exponential:0.5") == skewed
    assert popularity("paced:table.json", "exponential:0.5") is None  # its durations are measured
    with pytest.raises(ConfigError, match="a paced GPU draws them: give uniform or exponential:LAMBDA"):
        popularity("paced:h20", "trace:choices.npy")


def test_tokens_of_a_paced_gpu_visit_the_experts_of_the_override():
    keys, counts = request_key(0) + np.arange(40_000, dtype=np.uint64), {}
    for override in ("uniform", "exponential:0.5"):
        paced = PacedSettings(
            device="paced:a100", network="mixtral-8x7b", popularity=overridden_popularity(override, seed=5)
        )
        gate = paced_gate(stage_cost_of(paced), paced, seed=5)
        assert gate is not None
        counts[override] = gate.count(keys, range(2)) / len(keys)  # of two layers
    assert np.allclose(counts["uniform"], 2 / 8, atol=0.01)
    hottest = counts["exponential:0.5"].argmax(axis=1)
    assert counts["exponential:0.5"].max(axis=1).min() > 0.6  # nearly every second choice
    assert hottest[0] != hottest[1]  # layers are shuffled


@pytest.mark.parametrize(("name", "billions"), [("qwen3-30b-a3b", 30.5), ("mixtral-8x7b", 46.7), ("deepseek-v3", 671)])
def test_parameters_are_counted_as_published(name, billions):
    assert num_parameters(network_named(name)) == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--device", "paced:h21"), ("'h21'", "h20-96g", "h100")),
        (("qwen4", "--device", "paced:h20"), ("'qwen4'", "qwen3-30b-a3b", "mixtral-8x7b")),
        (("--paced-arithmetic", "none"), ("--device paced:GPU",)),
    ],
)
def test_what_cannot_be_paced_is_exit_2_with_what_can(capsys, flags, words):
    with pytest.raises(SystemExit) as caught:
        main(["serve", *flags])
    assert caught.value.code == 2
    answered = capsys.readouterr().err
    assert all(word in answered for word in words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("deepseek-v3",), "deepseek-v3 does not fit a h20-96g"),
        (("--max-model-len", "2000", "--num-gpu-blocks-override", "77"), "does not fit in the KV cache"),
    ],
)
def test_what_does_not_fit_the_gpu_is_exit_2(tmp_path, flags, words):
    server = Running((*REAL, *flags, "--device", "paced:h20", "--paced-arithmetic", "none"), tmp_path, wait=False)
    assert server.process.wait(PATIENCE_S) == 2
    assert words in " ".join(server.text.split())


def bench_of(server: Running, result: Path) -> dict[str, Any]:
    """Two requests of five tokens."""
    sizes = ("--num-prompts", "2", "--random-input-len", "24", "--random-output-len", "5", "--num-warmups", "0")
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--base-url", server.url, *sizes, "--json", str(result)])
    assert caught.value.code == 0
    return json.loads(result.read_text())


def test_a_record_of_the_server_can_be_replayed_under_another_policy(tmp_path, capsys):
    record = tmp_path / "record.jsonl"
    flags = ("--device", "paced:h20", "--paced-arithmetic", "none", "--engines", "2", "--record", str(record))
    server = Running((*REAL, *flags), tmp_path)
    try:
        for i in range(6):
            complete(server, prompt="def f(x):\n    return x\n" * (1 + i), max_tokens=5)
        assert complete(server, prompt="", max_tokens=-1).status == 400, "what is refused is in no record"
        reported = bench_of(server, tmp_path / "bench.json")
        assert server.stop() == 0
    finally:
        server.kill()
    assert reported["conditions"]["kind"] == "paced"
    read = read_request_record(record)
    assert len(read.requests) == 8
    assert [request.num_output_tokens for request in read.requests] == [5] * 8
    assert {request.engine for request in read.requests} == {0, 1}
    for request in read.requests:
        assert request.arrival_ns <= request.admitted_ns < request.first_token_ns < request.last_token_ns
        assert len(request.block_hashes) == request.num_prompt_tokens // 16 * 16
    with pytest.raises(SystemExit):
        main(["sim", "--replay", str(record), "--policy", "lmetric"])
    answered = capsys.readouterr().out
    assert "Under lmetric (simulated):" in answered
    assert "8 requests recorded under moestro" in answered
