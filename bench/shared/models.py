"""The networks that benches serve: the demo model, a random Qwen3-MoE of 640M, and the shape of Qwen3-30B-A3B."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "src" / "moestro" / "assets" / "demo"


def make_random_model(directory: Path) -> Path:
    """Make the 640M Qwen3-MoE with random weights and the demo model's tokenizer, unless it exists."""
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
        _copy_tokenizer(directory)
    return directory


def make_dense_model(directory: Path) -> Path:
    """Make a dense Qwen3 of the demo model's width with random weights and its tokenizer, unless it exists."""
    if not (directory / "config.json").exists():
        import torch  # noqa: PLC0415 - only where there is a model to make
        from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: PLC0415

        config = Qwen3Config(
            vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=7, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=2,
            pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
        _copy_tokenizer(directory)
    return directory


def _copy_tokenizer(directory: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, directory / name)


def make_qwen3_config(directory: Path, num_layers: int = 48, num_experts: int = 128, vocabulary: int = 151_936) -> Path:
    """Write the config of Qwen3-30B-A3B, or of a smaller network of its width, without weights."""
    from transformers import Qwen3MoeConfig  # noqa: PLC0415

    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=2048, intermediate_size=6144, num_hidden_layers=num_layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=num_experts, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rms_norm_eps=1e-6, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(directory)
    return directory
