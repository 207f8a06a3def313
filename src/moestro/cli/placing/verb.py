"""`moestro place`: reads, asks, shows, and writes files."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from moestro.cli.app import require_extra
from moestro.cli.placing.placements import Ints, all_model_layers, apply_placement, write_json, write_tensorrt_llm
from moestro.cli.placing.question import PlaceQuestion, load_to_check, make_question
from moestro.cli.placing.settings import EVEN_POLICY, PlacePolicySettings, PlaceSettings
from moestro.cli.placing.show import (
    PlaceAnswer,
    ask,
    ask_all,
    line,
    placement_file,
    print_answer,
    print_check,
    print_comparison,
    print_question,
)
from moestro.config.output_files import check_files
from moestro.placement.contract import PLACE_POLICIES
from moestro.placement.kernel.choice import end_search
from moestro.placement.payback import payback
from moestro.workload.experts.expert_profile import write_profile
from moestro.workload.progress import progress, progress_bar

COMPILED_WITHIN_S = 10.0  # the placement kernel takes 1 s of a core, and a loaded machine has less than one


def run_place(settings: PlaceSettings, console: Console) -> None:
    """Answer the question of `settings`, print the answer, and write the files that it asks for.

    Raises:
        ConfigError: A name is unknown, a file cannot be read or written, or a library is not installed.
        PlacementError: The policy finds no placement.
    """
    if settings.output.png is not None:
        require_extra("plots", "--png")
    settings.output.check_folders()
    check_files({"--save-profile": settings.profile.save_profile})
    with progress_bar(Console(stderr=True)) as bar:
        bar.add_task("reading the profile", total=None)
        question = make_question(settings)
        check = settings.policy.check
        later = None if check is None else load_to_check(question, check)
    print_question(console, question)
    if settings.profile.offline is not None:
        _compare_offline(console, question, settings.profile.offline)
    if settings.profile.save_profile is not None:
        write_profile(settings.profile.save_profile, question.profile)
        line(console, f"written: {settings.profile.save_profile}")
    policy, fills_slots = settings.policy.policy, settings.output.is_for_engines
    if fills_slots:
        line(console, "- every slot gets an expert, and copies share evenly, as SGLang and TensorRT-LLM have it")
        policy = EVEN_POLICY if policy == PlacePolicySettings().policy else policy
    mixes_sources = (settings.policy.sources or ("mean" if fills_slots else "own")) == "mean"
    if mixes_sources and question.profile.num_sources > 1:
        line(console, "- plans see the mean of all sources (--sources own: those of each)")
    with progress_bar(Console(stderr=True)) as bar:
        bar.add_task("placing", total=None)
        answer = ask(policy, question.view, fills_slots=fills_slots, mixes_sources=mixes_sources)
    print_answer(console, question, answer)
    if check is not None and later is not None:
        change = payback(replace(question.view, load=later), answer.table)
        print_check(console, check.name, change.before, change.after)
    if settings.policy.compare:
        with progress("comparing policies", len(PLACE_POLICIES.names())) as advance:
            others = ask_all(question.view, advance, fills_slots=fills_slots, mixes_sources=mixes_sources)
        print_comparison(console, {answer.policy: answer} | others, question.view.limits.horizon_steps)
    _write(console, question, answer)
    end_search(COMPILED_WITHIN_S)


def _compare_offline(console: Console, question: PlaceQuestion, model: str) -> None:
    require_extra("serve", "--offline")
    from moestro.calibrate.shapes import RandomInput
    from moestro.cli.placing.offline import compare_offline, offline_load

    with progress_bar(Console(stderr=True)) as bar:
        bar.add_task("random tokens", total=None)
        load = offline_load(model, RandomInput())
    line(console, str(compare_offline(question.profile, load)))


def _write(console: Console, question: PlaceQuestion, answer: PlaceAnswer) -> None:
    output = question.settings.output
    if output.out is not None:
        write_json("--out", output.out, placement_file(question, answer))
        line(console, f"written: {output.out}")
    if answer.rows is not None:
        _write_for_engines(console, question, answer.rows)
    if output.png is not None:
        from moestro.cli.placing.draw import save_placement

        save_placement(output.png, question, answer)
        line(console, f"written: {output.png}")
    if output.apply is not None:
        line(console, apply_placement(output.apply, output.admin_api_key, placement_file(question, answer)))


def _write_for_engines(console: Console, question: PlaceQuestion, rows: Ints) -> None:
    view, profile, output = question.view, question.profile, question.settings.output
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
