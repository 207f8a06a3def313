"""Cases of clients with a command line: load generators, and the evaluation harness."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from environments import own_environment
from shared.models import DEMO

TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{rest}
"""
CHOICES = "doc_to_choice: choices\nmetric_list:\n  - metric: acc"
GENERATE = 'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 16\nmetric_list:\n  - metric: exact_match'
QUESTIONS = [
    {"question": "import os\nimport", "choices": [" sys", " banana"], "answer": 0, "line": "sys"},
    {"question": "def __init__(", "choices": ["self", "water"], "answer": 0, "line": "self"},
    {"question": "for i in", "choices": [" range", " whale"], "answer": 0, "line": "range"},
    {"question": "if x is", "choices": [" purple", " None"], "answer": 1, "line": "None"},
]
NUM_REQUESTS, TOKENS_IN, TOKENS_OUT = 40, 64, 16


def run(command: list[str | Path], timeout_s: float = 900) -> str:
    """Run a command and return its output; AssertionError with the end of it if the command fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=own_environment(), check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    return done.stdout


def lm_eval_completions(python: Path, url: str, model: str, work: Path) -> None:
    """Run lm-eval: multiple choice by log likelihood (echo, logprobs), and generation until a stop string."""
    tasks = [_task(work, "moestro_choice", "multiple_choice"), _task(work, "moestro_line", "generate_until")]
    scores = _lm_eval(python, "local-completions", f"{url}/v1/completions", model, tasks, work)
    assert scores["moestro_choice"]["acc,none"] >= 0.75, scores
    assert "exact_match,none" in scores["moestro_line"], scores


def lm_eval_chat(python: Path, url: str, model: str, work: Path) -> None:
    """Run lm-eval: generation by chats, which is all that its client of chats can do."""
    tasks = [_task(work, "moestro_line", "generate_until")]
    scores = _lm_eval(python, "local-chat-completions", f"{url}/v1/chat/completions", model, tasks, work)
    assert "exact_match,none" in scores["moestro_line"], scores


def _task(work: Path, name: str, kind: str) -> str:
    data = work / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    target, rest = ("answer", CHOICES) if kind == "multiple_choice" else ("line", GENERATE)
    (work / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind, target=target, rest=rest))
    return name


def _lm_eval(python: Path, kind: str, url: str, model: str, tasks: list[str], work: Path) -> dict[str, dict]:
    fields = f"model={model},base_url={url},tokenizer={DEMO},tokenizer_backend=huggingface,num_concurrent=2"
    out = work / "lm_eval"
    chat = ["--apply_chat_template"] if "chat" in kind else []
    command = [python.with_name("lm_eval"), "run", "--model", kind, "--model_args", fields, *chat]
    run([*command, "--tasks", ",".join(tasks), "--include_path", work, "--output_path", out])
    return json.loads(next(out.rglob("results*.json")).read_text())["results"]


def aiperf(python: Path, url: str, model: str, work: Path) -> None:
    """Run aiperf: streamed chats of an exact length; none may fail."""
    load = ["--request-count", str(NUM_REQUESTS), "--concurrency", "4", "--isl", str(TOKENS_IN)]
    what = ["--model", model, "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", DEMO]
    exact = ["--osl", str(TOKENS_OUT), "--extra-inputs", "ignore_eos:true"]
    exact += ["--extra-inputs", f"min_tokens:{TOKENS_OUT}"]
    out = work / "aiperf"
    run([python.with_name("aiperf"), "profile", *what, *load, *exact, "--artifact-dir", out, "--ui", "none"])
    report = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS, report["request_count"]
    assert not (report.get("error_request_count") or {}).get("avg"), report["error_request_count"]


def guidellm(python: Path, url: str, model: str, work: Path) -> None:
    """Run guidellm: synthetic prompts, four at a time; none may fail."""
    out = work / "guidellm.json"
    what = ["--backend", f"kind=openai_http,target={url},model={model}"]
    what += ["--tokenizer", f"kind=huggingface_auto,model={DEMO}"]
    what += ["--data", f"kind=synthetic_text,prompt_tokens={TOKENS_IN},output_tokens={TOKENS_OUT}"]
    load = ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    run([python.with_name("guidellm"), "run", *what, *load, "--output", f"kind=json,path={out}", "--disable-console"])
    [benchmark] = json.loads(out.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] >= NUM_REQUESTS - 4, totals
    assert not totals["errored"], totals


def vllm_bench(python: Path, url: str, model: str, work: Path) -> None:
    """Run `vllm bench serve` with both of its backends; none may fail."""
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        out = work / f"{backend}.json"
        what = ["--backend", backend, "--base-url", url, "--endpoint", path, "--model", model, "--tokenizer", DEMO]
        load = ["--dataset-name", "random", "--random-input-len", str(TOKENS_IN), "--random-output-len"]
        load += [str(TOKENS_OUT), "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "4", "--ignore-eos"]
        save = ["--save-result", "--result-dir", out.parent, "--result-filename", out.name, "--disable-tqdm"]
        run([python.with_name("vllm"), "bench", "serve", *what, *load, *save])
        result = json.loads(out.read_text())
        assert (result["completed"], result.get("failed", 0)) == (NUM_REQUESTS, 0), result
