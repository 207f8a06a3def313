"""The networks that benches serve: the demo model, and a random Qwen3-MoE of 640M parameters."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "src" / "moestro" / "assets" / "demo"


def make_random_model(directory: Path) -> Path:
    """The 640M Qwen3-MoE with the demo model's tokenizer, random weights; made once."""
    if not (directory / "config.json").exists():
        import torch  # noqa: PLC0415 - only where there is a model to make
        from transformers import AutoModelForCausalLM, Qwen3MoeConfig  # noqa: PLC0415

        config = Qwen3MoeConfig(
            vocab_size=4096, hidden_size=1024, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=16,
            num_key_value_heads=4, head_dim=64, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512,
            norm_topk_prob=True, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(DEMO / name, directory / name)
    return directory
