"""Train Moestro's embedded demo model: a small Qwen3-MoE that continues Python code.

The data is the standard library of the Python that runs this script (PSF licence): every `.py` file outside its test
folders, plus chat examples made from its own functions (the docstring asks, the source answers). Nothing is downloaded.

    python tools/train_demo_model.py --work /tmp/demo            # train; safe to stop and start again
    python tools/train_demo_model.py --work /tmp/demo --export src/moestro/assets/demo

Stages: read text -> train a byte-level BPE -> encode -> train -> measure held-out loss beside unigram and bigram
baselines on the same held-out tokens -> write config, safetensors, tokenizer and a model card.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB_SIZE = 4096
CONTEXT = 1024
SHORT_CONTEXT = 256
HELD_OUT_SHARE = 0.05
# Weight of the gate's balance loss, from a step onwards: little at first, so that experts come to differ, then enough
# to bring the busiest one to two or three times the mean, as in published models, and at the end no more than keeps it.
BALANCE_FROM_STEP = {0: 0.003, 1000: 0.02, 2400: 0.003}
END, USER_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "turtledemo"}
# The pre-tokenizer of the Qwen family: single digits, runs of spaces kept together, newlines with their indentation.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# --- data ------------------------------------------------------------------------------------------------------------


def is_held_out(name: str) -> bool:
    """Whether a file is kept from training: a fixed hash of its path, so that every run and machine agrees."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT_SHARE


def read_standard_library() -> dict[str, str]:
    """{relative path: text} of the standard library's own sources, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_DIRECTORIES & set(relative.parts):
            continue
        try:
            files[str(relative)] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return files


def chat_examples(source: str) -> list[str]:
    """One chat per documented function: its docstring's first paragraph asks for it, its source answers."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    chats = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring, code = ast.get_docstring(node), ast.get_source_segment(source, node)
        if not docstring or not code or len(code) > 1500:
            continue
        task = " ".join(docstring.split("\n\n")[0].split())
        chats.append(
            f"{USER_START}user\nWrite a Python function `{node.name}`: {task}{TURN_END}\n"
            f"{USER_START}assistant\n{code}{TURN_END}\n{END}"
        )
    return chats


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, USER_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prepare_data(work: Path) -> dict[str, np.ndarray]:
    """Token streams `train` and `held_out` (uint16), made once and kept in `work`."""
    kept = {name: work / f"{name}.npy" for name in ("train", "held_out")}
    if all(path.exists() for path in kept.values()):
        return {name: np.load(path) for name, path in kept.items()}
    files = read_standard_library()
    tokenizer = train_tokenizer([text for name, text in files.items() if not is_held_out(name)])
    tokenizer.save(str(work / "tokenizer.json"))
    documents: dict[str, list[str]] = {"train": [], "held_out": []}
    for name, text in files.items():
        side = "held_out" if is_held_out(name) else "train"
        documents[side].append(text + END)
        documents[side].extend(chat_examples(text))
    rng = np.random.default_rng(0)
    streams = {}
    for side, texts in documents.items():
        rng.shuffle(texts)  # type: ignore[arg-type]
        streams[side] = np.concatenate([np.array(e.ids, np.uint16) for e in tokenizer.encode_batch(texts)])
        np.save(kept[side], streams[side])
        print(f"{side}: {len(texts)} documents, {len(streams[side]):,} tokens")
    return streams


# --- baselines -------------------------------------------------------------------------------------------------------


def unigram_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    """Nats per token of add-one unigram frequencies, on every held-out token but the first."""
    counts = np.bincount(train, minlength=VOCAB_SIZE) + 1.0
    return float(-np.log(counts / counts.sum())[held_out[1:]].mean())


def bigram_loss(train: np.ndarray, held_out: np.ndarray, discount: float = 0.75) -> float:
    """Nats per token of a bigram model with absolute discounting, backed by the unigram, on the same tokens."""
    unigram = np.bincount(train, minlength=VOCAB_SIZE) + 1.0
    unigram /= unigram.sum()
    pairs = np.bincount(train[:-1].astype(np.int64) * VOCAB_SIZE + train[1:], minlength=VOCAB_SIZE**2)
    table = pairs.reshape(VOCAB_SIZE, VOCAB_SIZE)
    total, distinct = table.sum(1), (table > 0).sum(1)
    left, right = held_out[:-1], held_out[1:]
    seen = np.maximum(table[left, right] - discount, 0)
    backed = np.where(total[left] > 0, discount * distinct[left], 1) * unigram[right]
    return float(-np.log((seen + backed) / np.maximum(total[left], 1)).mean())


# --- training --------------------------------------------------------------------------------------------------------


def demo_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
        dtype="bfloat16",
    )


def gate_balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """Switch Transformer's auxiliary loss (eq. 4), layer by layer: 1 where experts are used evenly, more where not."""
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = F.one_hot(probabilities.topk(top_k, -1).indices, logits.shape[-1]).float().sum(1)
        losses.append(logits.shape[-1] * (chosen.mean(0) / top_k * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Warm up over 2 %, stay, then go down linearly to zero over the last half."""
    return min((step + 1) / (0.02 * num_steps), 1.0, (num_steps - step) / (0.5 * num_steps))


def batch_at(stream: np.ndarray, step: int, args: argparse.Namespace) -> torch.Tensor:
    """int64[windows, length + 1], `args.batch_tokens` tokens, at offsets that depend on the step alone.

    So a resumed run sees what an unbroken one does. The first 80 % of the steps take short windows, where attention is
    cheap, the rest the full CONTEXT.
    """
    length = SHORT_CONTEXT if step < 0.8 * args.steps else CONTEXT
    starts = np.random.default_rng(step).integers(0, len(stream) - length - 1, args.batch_tokens // length)
    return torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64)).to(args.device)


def orthogonalized(update: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix (of each matrix in a stack), by five Newton-Schulz steps in bfloat16."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized, for matrices and stacks of expert matrices (K. Jordan 2024).

    `torch.optim.Muon` takes plain matrices only; Qwen3-MoE packs the experts of a layer in one tensor.
    """

    def __init__(self, params: list[torch.nn.Parameter], momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": 0.0})
        self.momentum = momentum

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                memory = self.state[p].setdefault("momentum", torch.zeros_like(p))
                memory.lerp_(p.grad, 1 - self.momentum)
                update = orthogonalized(p.grad.lerp(memory, self.momentum))
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)


def make_optimizers(model: torch.nn.Module, peak_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers; AdamW, at a tenth of its rate, for embeddings, gates and norms."""
    named = list(model.named_parameters())
    inner = [p for name, p in named if p.dim() >= 2 and "embed" not in name and "mlp.gate." not in name]
    chosen = {id(p) for p in inner}
    others = [p for _, p in named if id(p) not in chosen]
    optimizers = [Muon(inner), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]
    for optimizer, peak in zip(optimizers, (peak_lr, peak_lr / 10), strict=True):
        for group in optimizer.param_groups:
            group["peak_lr"] = peak
    return optimizers


def train(args: argparse.Namespace, stream: np.ndarray) -> tuple[Qwen3MoeForCausalLM, dict[str, float]]:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(demo_config()).float().to(args.device)
    model.set_experts_implementation("grouped_mm")
    optimizers = make_optimizers(model, args.peak_lr)
    checkpoint, step, seconds = args.work / "checkpoint.pt", 0, 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location=args.device)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        step, seconds = saved["step"], saved["seconds"]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("training", total=args.steps, completed=step)
        while step < args.steps:
            started = time.perf_counter()
            loss, balance = train_step(model, optimizers, batch_at(stream, step, args), step, args)
            step, seconds = step + 1, seconds + time.perf_counter() - started
            progress.update(bar, completed=step, description=f"loss {loss:.3f}")
            if step % 25 == 0:
                rate = args.batch_tokens / (time.perf_counter() - started)
                print(f"step {step} loss {loss:.3f} balance {balance:.3f} {rate:.0f} tokens/s", flush=True)
            if step % 200 == 0 or step == args.steps:
                states = [optimizer.state_dict() for optimizer in optimizers]
                state = {"model": model.state_dict(), "optimizers": states, "step": step, "seconds": seconds}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").rename(checkpoint)
    return model.eval(), {"steps": step, "seconds": seconds}


def train_step(
    model: Qwen3MoeForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    ids: torch.Tensor,
    step: int,
    args: argparse.Namespace,
) -> tuple[float, float]:
    with torch.autocast(args.device, dtype=torch.bfloat16):
        out = model.model(input_ids=ids[:, :-1], use_cache=False, output_router_logits=True)
        logits = model.lm_head(out.last_hidden_state)
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    balance = gate_balance_loss(out.router_logits, model.config.num_experts_per_tok)
    coefficient = max((start, weight) for start, weight in BALANCE_FROM_STEP.items() if start <= step)[1]
    (loss + coefficient * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    factor = learning_rate_factor(step, args.steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach()), float(balance.detach())


# --- measuring and export --------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure(model: Qwen3MoeForCausalLM, held_out: np.ndarray, device: str) -> tuple[float, list[float], list[int]]:
    """Held-out nats per token (windows of CONTEXT), per layer expert max/mean, per layer experts never used."""
    config = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.float64)
    total, num_tokens = 0.0, 0
    for start in range(0, len(held_out) - 1, CONTEXT):
        ids = torch.from_numpy(held_out[start : start + CONTEXT + 1].astype(np.int64))[None].to(device)
        out = model(input_ids=ids[:, :-1], use_cache=False, output_router_logits=True)
        total += float(F.cross_entropy(out.logits[0].float(), ids[0, 1:], reduction="sum"))
        num_tokens += ids.shape[1] - 1
        for layer, logits in enumerate(out.router_logits):
            chosen = logits.float().topk(config.num_experts_per_tok, -1).indices.flatten().cpu()
            counts[layer] += torch.bincount(chosen, minlength=config.num_experts)
    imbalance = (counts.max(1).values / counts.mean(1)).tolist()
    return total / num_tokens, imbalance, (counts == 0).sum(1).tolist()


def export(
    args: argparse.Namespace, model: Qwen3MoeForCausalLM, spent: dict[str, float], streams: dict[str, np.ndarray]
) -> None:
    """Write the checkpoint in bfloat16 with tokenizer and card; the measured loss is that of the bfloat16 weights."""
    model = model.bfloat16()
    loss, imbalance, unused = measure(model.float(), streams["held_out"], args.device)
    report = {
        "held_out_loss": loss,
        "unigram_loss": unigram_loss(streams["train"], streams["held_out"]),
        "bigram_loss": bigram_loss(streams["train"], streams["held_out"]),
        "expert_max_over_mean": imbalance,
        "unused_experts": unused,
        "train_tokens": len(streams["train"]),
        "held_out_tokens": len(streams["held_out"]),
        "tokens_seen": int(spent["steps"]) * args.batch_tokens,
        **spent,
        "peak_lr": args.peak_lr,
        "balance_from_step": BALANCE_FROM_STEP,
        "device": args.device,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(json.dumps(report, indent=1))
    model.bfloat16().save_pretrained(args.export)
    PreTrainedTokenizerFast(
        tokenizer_file=str(args.work / "tokenizer.json"),
        eos_token=TURN_END,
        pad_token=END,
        additional_special_tokens=[USER_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=model.config.max_position_embeddings,
    ).save_pretrained(args.export)
    # The class name that every version of transformers and every other engine knows.
    tokenizer_config = args.export / "tokenizer_config.json"
    settings = json.loads(tokenizer_config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer_config.write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"eos_token_id": [0, 2], "pad_token_id": 0}
    (args.export / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (args.export / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.export / "README.md").write_text(card(model, report))


def card(model: Qwen3MoeForCausalLM, report: dict[str, Any]) -> str:
    template = (Path(__file__).parent / "demo_model_card.md").read_text()
    return template.format(
        **model.config.to_dict() | {"num_experts": model.config.num_experts},
        **report,
        millions=sum(p.numel() for p in model.parameters()) / 1e6,
        held_out_share=HELD_OUT_SHARE,
        short_context=SHORT_CONTEXT,
        context=CONTEXT,
        minutes=report["seconds"] / 60,
        ratios=", ".join(f"{ratio:.2f}" for ratio in report["expert_max_over_mean"]),
        num_unused=sum(report["unused_experts"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for data, tokenizer and the resumable checkpoint"
    )
    parser.add_argument("--export", type=Path, help="write the finished model here (a Hugging Face checkpoint folder)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1: leaves the machine usable)")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens a step")
    parser.add_argument("--peak-lr", type=float, default=0.02, help="Muon's; AdamW's is a tenth of it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    streams = prepare_data(args.work)
    for name, baseline in (("unigram", unigram_loss), ("bigram", bigram_loss)):
        print(f"{name} baseline: {baseline(streams['train'], streams['held_out']):.3f} nats/token", flush=True)
    model, spent = train(args, streams["train"])
    if args.export:
        export(args, model, spent, streams)


if __name__ == "__main__":
    main()
