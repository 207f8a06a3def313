"""Runs real clients, unmodified and each in a separate environment, against `moestro serve` with the demo model.

    python bench/serving/clients.py --json bench/results/serving/clients.json \\
        [--litellm VENV/bin/python] [--lm-eval VENV/bin/lm_eval] [--aiperf VENV/bin/aiperf]

The environments need these packages: litellm; lm-eval[api] and transformers; aiperf. The test suite runs the `openai`
client.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO
from shared.results import make_parser, package_version, save
from shared.server import moestro

MODEL, PORT = "moestro-demo", 8190
URL = f"http://127.0.0.1:{PORT}"
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


def run(command: list[str], timeout_s: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)


def litellm(python: str, _work: Path) -> dict[str, object]:
    done = run([python, str(Path(__file__).with_name("litellm_client.py")), f"{URL}/v1", MODEL])
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["all_forms_agree"], facts
    assert facts["too_long"] == "ContextWindowExceededError", facts
    return {"version": package_version(python, "litellm"), **facts}


def lm_eval(command: str, work: Path) -> dict[str, object]:
    """Run lm-eval: multiple choice by log likelihood (echo, logprobs), and generation until a stop string."""
    data = work / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, kind, target, rest in (
        ("moestro_choice", "multiple_choice", "answer", CHOICES),
        ("moestro_line", "generate_until", "line", GENERATE),
    ):
        text = TASK.format(name=name, data=data, kind=kind, target=target, rest=rest)
        (work / f"{name}.yaml").write_text(text)
    model = (
        f"model={MODEL},base_url={URL}/v1/completions,tokenizer={DEMO},tokenizer_backend=huggingface,num_concurrent=2"
    )
    out = work / "lm_eval"
    tasks = ["--tasks", "moestro_choice,moestro_line", "--include_path", str(work), "--output_path", str(out)]
    done = run([command, "run", "--model", "local-completions", "--model_args", model, *tasks])
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    results = json.loads(next(out.rglob("results*.json")).read_text())["results"]
    facts = {name: {k: v for k, v in scores.items() if isinstance(v, float)} for name, scores in results.items()}
    assert facts["moestro_choice"]["acc,none"] >= 0.75, facts
    return {"version": package_version(Path(command).with_name("python"), "lm_eval"), **facts}


def aiperf(command: str, work: Path) -> dict[str, object]:
    load = ["--request-count", "40", "--concurrency", "4", "--isl", "64", "--osl", "16"]
    what = ["--model", MODEL, "--url", URL, "--endpoint-type", "chat", "--streaming", "--tokenizer", str(DEMO)]
    exact = ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "min_tokens:16"]
    out = ["--artifact-dir", str(work / "aiperf"), "--ui", "none"]
    done = run([command, "profile", *what, *load, *exact, *out])
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    report = json.loads(next((work / "aiperf").rglob("profile_export_aiperf.json")).read_text())
    facts = {key: report[key]["avg"] for key in ("request_count", "output_sequence_length") if report.get(key)}
    errors = report.get("error_request_count") or {"avg": 0}
    assert facts["request_count"] == 40, facts
    assert errors["avg"] == 0, errors
    return {
        "version": package_version(Path(command).with_name("python"), "aiperf"),
        **facts,
        "errors": errors["avg"],
    }


def main() -> None:
    parser = make_parser(__doc__)
    for name in ("litellm", "lm-eval", "aiperf"):
        parser.add_argument(f"--{name}")
    args = parser.parse_args()
    conditions = run_record("measured")
    result: dict[str, object] = {"model": MODEL}
    with moestro(PORT) as server:
        for name, client, command in (
            ("litellm", litellm, args.litellm),
            ("lm_eval", lm_eval, args.lm_eval),
            ("aiperf", aiperf, args.aiperf),
        ):
            if command:
                with tempfile.TemporaryDirectory() as work:
                    result[name] = client(command, Path(work))
                print(name, json.dumps(result[name]), flush=True)
        result["left_over"] = server.wait_until_idle()["server_load"]
    save(args.json, conditions, result)


if __name__ == "__main__":
    main()
