"""Measures latent attention with compressed K and V against the same attention with K and V expanded, on a CPU.

    OMP_NUM_THREADS=1 python bench/micro/latent_attention.py --json bench/results/micro/latent_attention.json

A row is one layer from the queries and latents of a step to the results of its heads, without the other products of
the layer: `compressed` multiplies queries and results with the up-projection, `expanded` the latents. Both run on the
own kernels, in bfloat16, on equal units; `ratio` is compressed / expanded. Rows of kind `network` are whole prompts of
the first two layers of DeepSeek-V2-Lite, one dense and one with 64 experts, with random weights.

All is in processor time of one thread, the least of several rounds in turn.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from moestro.config.run_record import run_record
from moestro.core.work import Units
from moestro.model.attention import Scoring
from moestro.model.kernels.library import KernelBuild, KernelLibrary, KernelPacking
from moestro.model.kernels.paged import KernelAttention
from moestro.model.load import load_network, read_config
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.settings import ModelSettings
from moestro.model.step import PagedStep

sys.path.insert(0, str(Path(__file__).parents[1]))
from micro.cpu_kernels import BF16, BLOCK_SIZE, CPU, least_us, make_units, prompt_units
from shared.results import make_parser, save

LATENT, NOPE, ROPE, VALUE = 512, 128, 64, 128
HEADS = {"DeepSeek-V2-Lite": 16, "DeepSeek-V3": 128}
DECODES = ((1, 1024), (1, 8192), (8, 1024))  # sequences, tokens of context
PROMPTS = ((512, 0), (2048, 0), (256, 2048))  # tokens, tokens of context before them

LAYERS = {
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "kv_lora_rank": LATENT,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": HEADS["DeepSeek-V2-Lite"],
    "num_experts_per_tok": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS["DeepSeek-V2-Lite"],
    "q_lora_rank": None,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "topk_method": "greedy",
    "v_head_dim": VALUE,
    "vocab_size": 4096,
}
NETWORK_PROMPTS = (512, 2048)


@dataclass(frozen=True)
class Case:
    """A step of one layer.

    Attributes:
        network: name of the shape.
        kind: `decode` or `prompt`.
        num_units, num_tokens, context: sequences, tokens of each, and tokens of context before them.
    """

    network: str
    kind: str
    num_units: int
    num_tokens: int
    context: int

    def units(self) -> Units:
        """Return the step's units, over blocks in ascending order."""
        width = -(-(self.context + self.num_tokens) // BLOCK_SIZE)
        tables = np.arange(self.num_units * width).reshape(self.num_units, width)
        return make_units(np.full(self.num_units, self.context), tables, self.num_tokens)


def cases() -> Iterator[Case]:
    """Yield the cases; expanded K and V of DeepSeek-V3 take 80 KB a token."""
    for network in HEADS:
        for num_units, context in DECODES:
            yield Case(network, "decode", num_units, 1, context)
        for num_tokens, context in PROMPTS:
            if network != "DeepSeek-V3" or num_tokens <= 512:
                yield Case(network, "prompt", 1, num_tokens, context)


def ways(library: KernelLibrary, case: Case) -> dict[str, Callable[[], object]]:
    """Both forms of a case, over pools of zeros, whose numbers change no time."""
    heads, units, packing = HEADS[case.network], case.units(), KernelPacking(library)
    num_tokens, num_blocks = int(units.num_tokens.sum()), int(units.block_tables.max()) + 1
    query = torch.randn(1, num_tokens, heads, NOPE + ROPE).to(BF16).transpose(1, 2)
    rows = torch.randn(1, 1, num_tokens, LATENT + ROPE).to(BF16)
    weight = (torch.randn(heads, NOPE + VALUE, LATENT) / LATENT**0.5).to(BF16)
    of_queries, of_values = (packing.pack_heads(each) for each in (weight[:, :NOPE].transpose(1, 2), weight[:, NOPE:]))
    of_latents = packing.pack(weight.flatten(0, 1))
    attend, scaling = KernelAttention(library, None), (NOPE + ROPE) ** -0.5
    steps = [PagedStep(units, KVPools(num_blocks, BLOCK_SIZE), CPU) for _ in range(2)]

    def compressed() -> Tensor:
        absorbed = library.linear_heads(query[..., :NOPE], of_queries, LATENT)
        absorbed = torch.cat((absorbed, query[..., NOPE:]), dim=-1)
        scoring = Scoring(scaling, None, None, values_in_keys=True)
        out = attend(steps[0], 0, absorbed, rows, rows[..., :LATENT], scoring)
        return library.linear_heads(out.transpose(1, 2), of_values, VALUE)

    def expanded() -> Tensor:
        wide = (
            library.linear(rows[0, ..., :LATENT], of_latents).view(1, num_tokens, heads, NOPE + VALUE).transpose(1, 2)
        )
        key = torch.cat((wide[..., :NOPE], rows[..., LATENT:].expand(-1, heads, -1, -1)), dim=-1)
        return attend(steps[1], 0, query, key, wide[..., NOPE:], Scoring(scaling, None, None))

    return {"compressed": compressed, "expanded": expanded}


def measure(library: KernelLibrary, rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row for each case."""
    for case in cases():
        found = least_us(ways(library, case), rounds)
        kv_bytes = {"compressed": 2 * (LATENT + ROPE), "expanded": 2 * HEADS[case.network] * (NOPE + ROPE + VALUE)}
        yield {
            **asdict(case),
            **{f"{way}_us": us for way, us in found.items()},
            **{f"{way}_bytes_a_token": size for way, size in kv_bytes.items()},
            "ratio": round(found["compressed"] / found["expanded"], 2),
        }


def open_layers(directory: Path, library: KernelLibrary) -> tuple[Network, KVPools]:
    """Open the first layers of DeepSeek-V2-Lite on the own kernels."""
    settings = ModelSettings(model=str(directory), dtype="bfloat16", device="cpu", load_format="dummy")
    network, _ = load_network(settings, read_config(settings))
    pools = network.probe(BLOCK_SIZE)[0].allocate(NETWORK_PROMPTS[-1] // BLOCK_SIZE + 1)
    network.use_kernels(library)
    network.pack()
    return network, pools


def measure_network(library: KernelLibrary) -> Iterator[dict[str, object]]:
    """Yield a row for each length of a prompt."""
    with tempfile.TemporaryDirectory() as directory:
        AutoConfig.for_model("deepseek_v2", **LAYERS).save_pretrained(directory)
        opened = {"compressed": open_layers(Path(directory), library)}
        with patch("moestro.model.load.compress_attention", return_value=""):
            opened["expanded"] = open_layers(Path(directory), library)
    for length in NETWORK_PROMPTS:
        units = prompt_units(length)
        calls: dict[str, Callable[[], object]] = {
            name: lambda n=network, p=pools, u=units: n.logits(PagedStep(u, p, CPU))
            for name, (network, pools) in opened.items()
        }
        found = least_us(calls, 2)
        yield {
            "kind": "network",
            "num_tokens": length,
            **{f"{way}_us": us for way, us in found.items()},
            "ratio": round(found["compressed"] / found["expanded"], 2),
        }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    conditions = run_record("measured")
    library = KernelBuild().wait()
    if library is None:
        raise SystemExit("the kernels cannot be compiled here")
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        for row in chain(measure(library, args.rounds), measure_network(library)):
            rows.append(row)
            print(json.dumps(row), flush=True)
    setting = {"num_threads": torch.get_num_threads(), "instruction_set": library.instruction_set}
    save(args.json, conditions, {**setting, "rows": rows})


if __name__ == "__main__":
    main()
