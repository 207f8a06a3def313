"""`moestro place`: reads, asks, shows, and writes files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from moestro.cli.extras import install_command, is_installed, require_extra
from moestro.cli.placing.answer import PlaceAnswer, ask, ask_all, even_shares, placement_file
from moestro.cli.placing.placements import all_model_layers, filled_slots, write_json, write_tensorrt_llm
from moestro.cli.placing.question import PlaceQuestion, load_to_check, make_question
from moestro.cli.placing.settings import PlaceSettings
from moestro.cli.placing.show import line, print_answer, print_check, print_comparison, print_question
from moestro.placement.payback import payback
from moestro.placement.score import score
from moestro.workload.profile_file import write_profile
from moestro.workload.progress import progress_bar


def run_place(settings: PlaceSettings, console: Console) -> None:
    """Answer the question of `settings`, print the answer, and write the files that it asks for.

    Raises:
        ConfigError: A name is unknown, or a file cannot be read or written.
        PlacementError: The policy finds no placement.
    """
    with progress_bar(Console(stderr=True)) as bar:
        bar.add_task("reading the profile", total=None)
        question = make_question(settings)
    print_question(console, question)
    if settings.profile.offline is not None:
        _compare_offline(console, question, settings.profile.offline)
    if settings.profile.save_profile is not None:
        write_profile(settings.profile.save_profile, question.profile)
        line(console, f"written: {settings.profile.save_profile}")
    with progress_bar(Console(stderr=True)) as bar:
        bar.add_task("placing", total=None)
        answer = ask(settings.policy.policy, question.view)
        others = ask_all(question.view) if settings.policy.compare else {}
    print_answer(console, question, answer)
    if settings.policy.check is not None:
        _check(console, question, answer, settings.policy.check)
    if others:
        print_comparison(console, others)
    _write(console, question, answer)


def _compare_offline(console: Console, question: PlaceQuestion, model: str) -> None:
    require_extra("serve", "--offline")
    from moestro.calibrate.random_profile import RandomInput
    from moestro.cli.placing.offline import compare_offline, offline_load

    with progress_bar(Console(stderr=True)) as bar:
        bar.add_task("random tokens", total=None)
        load = offline_load(model, RandomInput())
    line(console, str(compare_offline(question.profile, load)))


def _check(console: Console, question: PlaceQuestion, answer: PlaceAnswer, path: Path) -> None:
    view = replace(question.view, load=load_to_check(question, path))
    change = payback(view, answer.table)
    print_check(console, path.name, change.before, change.after)


def _write(console: Console, question: PlaceQuestion, answer: PlaceAnswer) -> None:
    output = question.settings.output
    if output.out is not None:
        write_json("--out", output.out, placement_file(question, answer))
        line(console, f"written: {output.out}")
    if output.sglang is not None or output.tensorrt_llm is not None:
        _write_for_engines(console, question, answer)
    if output.png is None:
        return
    if not is_installed("plots"):
        line(console, f"no picture: {install_command('plots')}")
        return
    from moestro.cli.placing.draw import save_placement

    save_placement(output.png, question, answer)
    line(console, f"written: {output.png}")


def _write_for_engines(console: Console, question: PlaceQuestion, answer: PlaceAnswer) -> None:
    view, profile, output = question.view, question.profile, question.settings.output
    rows = filled_slots(answer.table, view.devices, view.load.total)
    even = score(view.load, even_shares(answer.table, rows, view), view.devices, view.prices)
    line(
        console,
        "SGLang and TensorRT-LLM fill all slots and divide tokens evenly among copies: balance"
        f" {even.balance_of_sums:.4f} (vLLM), {even.mean_balance:.4f} (SGLang).",
    )
    if output.sglang is not None:
        slots = all_model_layers(rows, profile.layers, profile.num_model_layers, profile.num_experts)
        write_json("--sglang", output.sglang, {"physical_to_logical_map": slots})
        line(
            console,
            f"written: {output.sglang}, for --init-expert-location with --ep-size {int(view.devices.is_alive.sum())}"
            f" --ep-num-redundant-experts {rows.shape[1] - profile.num_experts}",
        )
    if output.tensorrt_llm is not None:
        write_tensorrt_llm(output.tensorrt_llm, rows, profile.layers)
        line(console, f"written: {output.tensorrt_llm}, for moe_config.load_balancer")
