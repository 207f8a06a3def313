"""Chooses servers for bursts of GRPO groups, with `moestro-verl` and by verl's own rule; computed, without servers.

    python bench/routing/grpo_groups.py --json bench/results/routing/grpo_groups.json

A burst has 16 prompts of 200 to 1,200 tokens with 16 samples each, in random order. `answer_tokens` was chosen on other
bursts (seeds 0 to 4) than these.
"""

from __future__ import annotations

import sys
from pathlib import Path

from moestro.config.run_record import run_record

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "integrations/verl/src"), str(ROOT / "integrations/verl/tests")]
from shared.results import make_parser, save
from test_router import groups, hits_of, router, sticky

SEEDS = range(100, 110)
NUM_SERVERS = (4, 8, 16)


def burst(num_servers: int, seed: int) -> dict[str, float]:
    """One burst: the most over the mean of the requests, and prompt tokens that the server had computed before."""
    balancer, requests = router(num_servers), groups(16, 16, seed)
    sent = [(balancer.acquire_server(name, prompt_ids=prompt)[0], prompt) for name, prompt in requests]
    loads = balancer.get_status()["servers"].values()
    return {
        "most_over_mean": max(loads) * num_servers / sum(loads),
        "hits": hits_of(sent),
        "verl_hits": hits_of(sticky(requests, num_servers)),
    }


def main() -> None:
    options = make_parser(__doc__).parse_args()
    record = run_record("simulated", "choices alone, without servers; ten bursts each")
    found = {str(number): [burst(number, seed) for seed in SEEDS] for number in NUM_SERVERS}
    for number, bursts in found.items():
        spans = {name: [round(f(each[name] for each in bursts), 3) for f in (min, max)] for name in bursts[0]}
        print(number, spans)
    save(options.json, record, {"bursts": found})


if __name__ == "__main__":
    main()
