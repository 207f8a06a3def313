"""Compares bfloat16 on the own CPU kernels, and on torch's, with float32: perplexity and choices on held-out text.

    python bench/micro/kernel_accuracy.py --json bench/results/micro/kernel_accuracy.json

The network is the demo model. The text is that of the standard library's files on which the model was not trained
(`tools/train_demo_model.py`), in windows of 512 tokens; each window is one prompt. A token's top-1 choice agrees if it
is that of float32. Windows are resampled (`RESAMPLES` times, fixed seed) for the interval of a difference.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from tokenizers import Tokenizer

from moestro.config.run_record import run_record
from moestro.core.work import LOGITS_PROMPT
from moestro.model.kernels.exchange import KernelExchange
from moestro.model.kernels.library import KernelBuild
from moestro.model.load import load_network, read_config
from moestro.model.settings import ModelSettings
from moestro.model.step import PagedStep

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools")]
from micro.cpu_kernels import BLOCK_SIZE, CPU, make_units
from shared.models import DEMO
from shared.results import make_parser, save
from train_demo_model import is_held_out, read_standard_library

LENGTH, RESAMPLES = 512, 10_000
Score = Callable[[np.ndarray], torch.Tensor]


def held_out_windows() -> Iterator[np.ndarray]:
    """Windows of the held-out files, each of one file, in a random order that is always the same."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [text for name, text in sorted(read_standard_library().items()) if is_held_out(name)]
    tokens = [np.array(encoded.ids, np.int32) for encoded in tokenizer.encode_batch(texts)]
    windows = [ids[at : at + LENGTH] for ids in tokens for at in range(0, len(ids) - LENGTH + 1, LENGTH)]
    return (windows[number] for number in np.random.default_rng(0).permutation(len(windows)))


def scorer(dtype: str, *, own: bool) -> Score:
    """Return what computes the log probabilities of a window's next tokens, [LENGTH, vocabulary] in float64."""
    settings = ModelSettings(model=str(DEMO), dtype=dtype, device="cpu")
    network, _ = load_network(settings, read_config(settings))
    pools = network.probe(BLOCK_SIZE)[0].allocate(LENGTH // BLOCK_SIZE + 1)
    if own:
        library = KernelBuild().wait()
        if library is None:
            raise SystemExit("the kernels cannot be compiled here")
        network.use_kernels(KernelExchange(library))
    network.pack()

    def score(window: np.ndarray) -> torch.Tensor:
        units = make_units(np.zeros(1), np.arange(LENGTH // BLOCK_SIZE + 1)[None], LENGTH)
        units.logits[:] = LOGITS_PROMPT
        units.token_ids[:] = window
        return network.logits(PagedStep(units, pools, CPU)).double().log_softmax(-1)

    return score


def interval(differences: np.ndarray) -> list[float]:
    """95 % interval of the mean over windows, by resampling them."""
    rng = np.random.default_rng(0)
    means = differences[rng.integers(0, len(differences), (RESAMPLES, len(differences)))].mean(1)
    return [float(value) for value in np.quantile(means, (0.025, 0.975))]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--windows", type=int, default=120, help="windows of 512 tokens")
    args = parser.parse_args()
    conditions = run_record("measured")
    ways = {
        "float32": scorer("float32", own=False),
        "own bfloat16": scorer("bfloat16", own=True),
        "torch bfloat16": scorer("bfloat16", own=False),
    }
    losses: dict[str, list[float]] = {name: [] for name in ways}
    agree: dict[str, list[float]] = {name: [] for name in ways}
    apart: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for window, _ in zip(held_out_windows(), track(range(args.windows)), strict=False):
            following = torch.from_numpy(window[1:].astype(np.int64))[:, None]
            found = {name: score(window)[:-1] for name, score in ways.items()}
            own = {name: logprobs.gather(1, following)[:, 0] for name, logprobs in found.items()}
            for name, logprobs in found.items():
                losses[name].append(float(-own[name].mean()))
                agree[name].append(float((logprobs.argmax(-1) == found["float32"].argmax(-1)).double().mean()))
                apart[name].append(float((own[name] - own["float32"]).abs().mean()))
    rows = [
        {
            "way": name,
            "perplexity": math.exp(float(np.mean(losses[name]))),
            "top1_agreement": float(np.mean(agree[name])),
            "logprob_error": float(np.mean(apart[name])),
        }
        for name in ways
    ]
    first, second = "own bfloat16", "torch bfloat16"
    pairs = {"loss": losses, "top1_agreement": agree, "logprob_error": apart}
    own_less_torch = {
        figure: {"mean": float(np.mean(difference)), "interval_95": interval(difference)}
        for figure, values in pairs.items()
        for difference in [np.subtract(values[first], values[second])]
    }
    figures = {
        "num_windows": len(losses[first]),
        "window_tokens": LENGTH,
        "rows": rows,
        "own_less_torch": own_less_torch,
    }
    save(args.json, conditions, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
