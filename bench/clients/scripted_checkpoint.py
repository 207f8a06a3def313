"""Writes a checkpoint that recites given texts, so that agents can be run end to end without a model that can think.

Each token of a text is followed by exactly one other token. The chat template ends the prompt with the name of a text,
and the model recites that text. The network is a Llama of one layer whose attention and MLP are zero: the last token
alone decides the next one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

HEAD_DIM = 64
END = "<eos>"
# Texts between these two characters make the entries of the vocabulary unique; the decoder removes them.
OPEN, CLOSE = "\ue000", "\ue001"


def write_checkpoint(directory: Path, texts: Mapping[str, str], template: str, context: int = 65536) -> None:
    """Write a checkpoint whose chats recite `texts`.

    Args:
        texts: Text by name. A prompt that ends with `@NAME@` is followed by this text.
        template: Chat template.
        context: Longest sequence, tokens.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary, following = {"<unk>": 0, END: 1}, {0: 1, 1: 1}
    names = []
    for name, text in texts.items():
        last = vocabulary[f"@{name}@"] = len(vocabulary)
        names.append(last)
        for piece in _pieces(text):
            token = vocabulary[f"{piece}{OPEN}{len(vocabulary)}{CLOSE}"] = len(vocabulary)
            following[last] = last = token
        following[last] = 1
    _write_tokenizer(directory, vocabulary, names)
    (directory / "chat_template.jinja").write_text(template)
    _write_network(directory, len(vocabulary), following, context)


def _pieces(text: str) -> list[str]:
    """Cut a text into pieces of four characters, as tokens are."""
    return [text[i : i + 4] for i in range(0, len(text), 4)]


def _write_tokenizer(directory: Path, vocabulary: dict[str, int], names: list[int]) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spelt = {token: text for text, token in vocabulary.items()}
    added = [{"id": token, "content": spelt[token], "special": token == 1, **flags} for token in (1, *names)]
    removed = {"type": "Replace", "pattern": {"Regex": f"{OPEN}[0-9]+{CLOSE}"}, "content": ""}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "added_tokens": added,
        "decoder": {"type": "Sequence", "decoders": [removed, {"type": "Fuse"}]},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_network(directory: Path, size: int, following: dict[int, int], context: int) -> None:
    """Write a network whose hidden state is the last token, and whose output layer maps it to the next one."""
    hidden = -(-size // HEAD_DIM) * HEAD_DIM
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": hidden // HEAD_DIM, "num_key_value_heads": 1,
        "head_dim": HEAD_DIM, "vocab_size": size, "max_position_embeddings": context, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 1, "dtype": "float32",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    heads = torch.zeros(size, hidden)
    heads[list(following.values()), list(following.keys())] = 1.0
    layer = "model.layers.0."
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (HEAD_DIM, hidden),
        "self_attn.v_proj": (HEAD_DIM, hidden), "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (64, hidden),
        "mlp.up_proj": (64, hidden), "mlp.down_proj": (hidden, 64),
    }  # fmt: skip
    tensors = {f"{layer}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    tensors |= {"model.embed_tokens.weight": torch.eye(size, hidden), "lm_head.weight": heads}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
