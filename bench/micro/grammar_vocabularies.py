"""Measures what structured output costs with a small and a large vocabulary, on one CPU thread.

    pip download --no-deps dashscope && unzip dashscope-*.whl dashscope/resources/qwen.tiktoken
    python bench/micro/grammar_vocabularies.py --tiktoken dashscope/resources/qwen.tiktoken \\
        --json bench/results/micro/grammar_vocabularies.json

The small vocabulary is the demo model's, the large one Qwen's 151,643 tokens. Each grammar is compiled `COMPILES`
times. Then `WALKS` answers follow it: each token is drawn among those that the mask allows, with a fixed seed, which
leads to stranger texts, and to more work, than a model's choice. Times are CPU times of the calling thread, which
other load on the machine hardly changes; that of a mask is llguidance's alone.
"""

from __future__ import annotations

import base64
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moestro.config.run_record import run_record
from moestro.core.request import Grammar
from moestro.grammar.compiler import GrammarCompiler, VocabularySource
from moestro.text.parsing.answer_grammars import required_calls
from moestro.text.parsing.output_parser import ToolSpec

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving.structured import ORDER, PERSON, TREE
from shared.models import DEMO
from shared.results import make_parser, save

COMPILES, WALKS, MAX_TOKENS = 5, 10, 300
END = "<|im_end|>"


def grammars() -> dict[str, Grammar]:
    tools = [ToolSpec(f"tool_{i}", PERSON if i % 2 else ORDER) for i in range(32)]
    schemas = {"person": PERSON, "order": ORDER, "tree": TREE}
    return {
        **{f"schema: {name}": Grammar("json_schema", json.dumps(schema)) for name, schema in schemas.items()},
        "any JSON object": Grammar("json_object"),
        "regex: words": Grammar("regex", "([a-z]{1,9} ){20,60}"),
        "one call of 32 tools": required_calls(tools, is_parallel=False),
    }


def byte_letters() -> dict[int, str]:
    """Return the letter by which byte-level BPE writes each byte. Source: GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merged_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two tokens from which the last merge makes `token`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def write_tokenizer(tiktoken: Path, directory: Path) -> VocabularySource:
    """Write tokenizer.json for a vocabulary in tiktoken's form, and an end token behind it."""
    lines = [line.split() for line in tiktoken.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = byte_letters()

    def spelt(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [tuple(map(spelt, merged_pair(token, ranks))) for token in ranks if len(token) > 1]
    tokenizer = Tokenizer(models.BPE({spelt(token): rank for token, rank in ranks.items()}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return VocabularySource(directory, len(ranks) + 1, (len(ranks),))


def mask_times_us(compiler: GrammarCompiler, grammar: Grammar) -> Iterator[float]:
    """Follow a grammar with random tokens; yield the time of each mask, in µs."""
    start = compiler.compile(grammar)
    words = np.zeros(-(-compiler.num_tokens // 32), np.int32)
    for seed in range(WALKS):
        matcher, rng = start.deep_copy(), random.Random(seed)
        for _ in range(MAX_TOKENS):
            began = time.thread_time()
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            yield 1e6 * (time.thread_time() - began)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            token = int(allowed[rng.randrange(len(allowed))])
            if not matcher.consume_token(token) or matcher.is_stopped():
                break


def figures_of(source: VocabularySource) -> dict[str, object]:
    process = psutil.Process()
    before, began = process.memory_info().rss, time.thread_time()
    compiler = GrammarCompiler(source)
    result: dict[str, object] = {
        "num_tokens": compiler.num_tokens,
        "load_s": round(time.thread_time() - began, 3),
        "load_mb": round((process.memory_info().rss - before) / 1e6),
    }
    for name, grammar in grammars().items():
        compiles = []
        for _ in range(COMPILES):
            began = time.thread_time()
            compiler.compile(grammar)
            compiles.append(1e3 * (time.thread_time() - began))
        times = sorted(mask_times_us(compiler, grammar))
        result[name] = {
            "compile_ms": round(statistics.median(compiles), 2),
            "mask_us_median": round(statistics.median(times)),
            "mask_us_p99": round(times[int(0.99 * len(times))]),
            "mask_us_max": round(times[-1]),
            "num_masks": len(times),
        }
        print(f"{compiler.num_tokens} tokens, {name}: {result[name]}", flush=True)
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiktoken", type=Path, required=True)
    args = parser.parse_args()
    conditions = run_record("measured")
    small = figures_of(VocabularySource(DEMO, 4096, (2,)))
    with tempfile.TemporaryDirectory() as directory:
        large = figures_of(write_tokenizer(args.tiktoken, Path(directory)))
    save(args.json, conditions, {"small": small, "large": large})


if __name__ == "__main__":
    main()
