"""`moestro serve --kv-offloading-size`: an evicted prompt is a hit from host memory, with equal tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.browser import chromium, needs_chromium
from support.running import EXACT, PATIENCE_S, Running, complete, free_port, metrics

NUM_BLOCKS = 40
SCARCE = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "480", *EXACT)
PROMPT = "def quicksort(items):\n    return items\n" * 10
OTHERS = ["import os\n" * 100, "class Tree:\n    pass\n" * 60, "for i in range(3):\n    print(i)\n" * 35]


@pytest.fixture(scope="module")
def tiered(short_command, tmp_path_factory) -> Iterator[Running]:
    command = (*short_command, *SCARCE, "--kv-offloading-size", "0.05")
    server = Running(command, tmp_path_factory.mktemp("tiered"), admin_port=free_port())
    yield server
    server.kill()


def ask(server: Running, prompt: str, **fields) -> tuple[str, int, int]:
    """The answer, its cached tokens, and those that came from host memory."""
    reply = complete(server, prompt=prompt, max_tokens=12, temperature=0, **fields)
    assert reply.status == 200, reply.body
    details = reply.json["usage"]["prompt_tokens_details"]
    return reply.json["choices"][0]["text"], details["cached_tokens"], details.get("host_cached_tokens", 0)


@pytest.fixture(scope="module")
def expected(short_server) -> dict[str, str]:
    """Answers of a server without host memory and with enough blocks, by prompt."""
    return {prompt: ask(short_server, prompt)[0] for prompt in (PROMPT, *OTHERS)}


def figure(server: Running, name: str) -> float:
    return metrics(server)[f'{name}{{engine="0"}}']


def test_an_evicted_prompt_is_a_hit_from_host_memory_with_equal_tokens(expected, tiered):
    first, cached, _ = ask(tiered, PROMPT)
    assert (first, cached) == (expected[PROMPT], 0)
    for other in OTHERS:
        assert ask(tiered, other)[0] == expected[other]
    again, cached, from_host = ask(tiered, PROMPT)
    assert again == expected[PROMPT]
    assert cached >= from_host >= 64
    once_more, cached_now, from_host_now = ask(tiered, PROMPT)
    assert once_more == expected[PROMPT]
    assert from_host_now == 0, "what came back is cached on the device"
    assert cached_now >= cached


def test_the_metrics_of_offloading_have_the_names_of_vllm(tiered):
    for prefix in ("vllm", "moestro"):
        assert figure(tiered, f"{prefix}:external_prefix_cache_hits_total") >= 64
        assert figure(tiered, f"{prefix}:kv_offload_store_bytes_total") > 0
        assert figure(tiered, f"{prefix}:kv_offload_load_bytes_total") > 0
        assert 0 < figure(tiered, f"{prefix}:kv_offload_cpu_cache_usage_perc") <= 1
    sources = {name: value for name, value in metrics(tiered).items() if "vllm:prompt_tokens_by_source_total" in name}
    assert next(value for name, value in sources.items() if "external_kv_transfer" in name) >= 64
    assert figure(tiered, "moestro:kv_copies_failed_total") == 0


@needs_chromium
def test_the_page_shows_hits_from_host_memory(tiered):
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{tiered.url}#engines")
        hits = page.locator(".tile").filter(has_text="Prefix hits")
        hits.filter(has_text="of tokens in a minute").wait_for()
        for prompt in (PROMPT, *OTHERS, PROMPT):
            ask(tiered, prompt)
        hits.filter(has_text="from host memory").wait_for()


def test_a_salted_prompt_sees_its_own_blocks_alone(tiered):
    ask(tiered, PROMPT, cache_salt="one")
    for other in OTHERS:
        ask(tiered, other)
    assert ask(tiered, PROMPT, cache_salt="two")[1:] == (0, 0)
    for other in OTHERS:
        ask(tiered, other)
    assert ask(tiered, PROMPT, cache_salt="one")[2] >= 64


def test_a_tier_smaller_than_a_prompt_serves_what_it_has(short_command, tmp_path, expected):
    command = (*short_command, *SCARCE, "--kv-offloading-size", "0.00006")  # one block
    small = Running(command, tmp_path)
    try:
        for prompt in (PROMPT, *OTHERS, PROMPT):
            assert ask(small, prompt)[0] == expected[prompt]
        assert small.stop() == 0
    finally:
        small.kill()


@pytest.mark.parametrize(
    "mode",
    [
        ("--mode", "preemptive"),
        ("--mode", "ep", "--engines", "2", "--route-policy", "round_robin"),
        ("--mode", "async", "--attention", "1", "--experts", "1"),
    ],
    ids=lambda mode: mode[1],
)
def test_every_mode_copies_evicted_prompts_back(short_command, tmp_path, expected, mode):
    spread = Running((*short_command, *SCARCE, *mode, "--kv-offloading-size", "0.05"), tmp_path)
    num_copied = 0
    try:
        for prompt in (PROMPT, *OTHERS) * 2:
            text, _, copied = ask(spread, prompt)
            assert text == expected[prompt]
            num_copied += copied
        assert num_copied >= 64
        assert spread.stop() == 0
    finally:
        spread.kill()


def test_a_host_without_the_memory_refuses_the_start(short_command, tmp_path):
    server = Running((*short_command, *SCARCE, "--kv-offloading-size", "999999"), tmp_path, wait=False)
    try:
        assert server.process.wait(PATIENCE_S) != 0
    finally:
        server.kill()
    text = " ".join(server.text.split())
    assert "--kv-offloading-size 999999 GiB is more than this host has free: beside weights and KV," in text
    assert "GiB fit. Give less, or 0 to compute evicted KV again." in text
