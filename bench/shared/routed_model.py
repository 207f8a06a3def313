"""A small network whose gates follow recorded choices, so that a real server has the load of a real network.

GPT-OSS-20B chooses 4 of 32 experts in each of 24 layers. The network here has some of these layers with as many experts
of a quarter of their width, and a hidden size of 16. So rows between engines are 180 times smaller, experts 720 times,
and rows weigh four times as much against the experts' work, as on a link of a quarter of the speed. The record names no
tokens, so each row gets an invented one, of its domain alone: a prompt of tokens of a domain visits the experts that
the domain's text visited.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from shared.models import DEMO

from moestro.workload.experts.expert_profile import RoutingTrace, read_routing

NUM_EXPERTS, NUM_CHOSEN, WIDTH, HIDDEN, VOCAB = 32, 4, 720, 16, 4096
_FIRST_TOKEN, _TOKENS_OF_A_DOMAIN = 64, 256


@dataclass(frozen=True, eq=False)
class RoutedModel:
    """The network and its record.

    Attributes:
        directory: Folder of its config.json; weights are drawn (`--load-format dummy`).
        gate: Value of `--gate-override`.
        tokens: int64[tokens] of each domain, whose rows of the record they visit.
    """

    directory: Path
    gate: str
    tokens: dict[str, np.ndarray]


def make_routed_model(directory: Path, routing: Path, domains: tuple[str, ...], num_layers: int) -> RoutedModel:
    """Make the network of some domains of the record in the folder `routing`, with evenly spread layers of it."""
    trace = read_routing(
        routing / "gptoss20b_routing_experts_u8.npy.zst", routing / "gptoss20b_routing_index.jsonl.zst"
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(num_layers)))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, directory / name)
    layers = np.linspace(0, trace.experts.shape[1] - 1, num_layers).round().astype(int)
    rows, ids, tokens = [], [], {}
    for number, domain in enumerate(domains):
        first = _FIRST_TOKEN + number * _TOKENS_OF_A_DOMAIN
        own = rows_of(trace, domain)[:, layers]
        tokens[domain] = np.arange(first, first + _TOKENS_OF_A_DOMAIN)
        rows.append(own)
        ids.append(tokens[domain][np.arange(len(own)) % _TOKENS_OF_A_DOMAIN])
    file = directory / "routing.npz"
    np.savez(file, experts=np.concatenate(rows), token_ids=np.concatenate(ids))
    return RoutedModel(directory, f"trace:{file}", tokens)


def rows_of(trace: RoutingTrace, domain: str) -> np.ndarray:
    """uint8[tokens, layers, chosen], all tokens of a benchmark's answers."""
    answers = [trace.tokens_of(each) for each in trace.generations if each.dataset == domain]
    assert answers, f"the record has no benchmark {domain}"
    return np.concatenate(answers)


def _config(num_layers: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "float32", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "moe_intermediate_size": WIDTH, "hidden_act": "silu",
        "num_hidden_layers": num_layers, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HIDDEN,
        "num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 2048, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "use_sliding_window": False, "attention_bias": False,
        "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.02,
    }  # fmt: skip
