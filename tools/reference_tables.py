"""Write the reference tables of docs/ and of tests/mutants.md, which are made from the code, or from a stored result.

Tables of SITE_ONLY are only in the built site (`make docs`); in the repository a sentence says where else they are.

    python tools/reference_tables.py            # write them
    python tools/reference_tables.py --check    # exit status 1 if one is out of date

A table stands in a Markdown file between `<!-- generated: NAME -->` and `<!-- end -->`. To add one, add a function that
returns its Markdown to TABLES, and put the two markers where the table belongs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import kernel_table
from accuracy_tables import accuracy_table, estimates_table, host_memory_table, summary_table
from attack_table import attacks_table
from client_tables import agents_table, clients_table
from flag_lists import flags_beside, flags_of
from gimbal_tables import (
    kv_memory_table,
    overload_table,
    prefixes_table,
    recorded_systems_table,
    routing_table,
    shapes_table,
    skew_table,
    sources_table,
    stack_table,
)
from lmetric_tables import ages_table, capacities_table, latencies_table, worse_table
from metric_tables import kv_event_metrics, own_metrics, route_metrics, shadow_metrics, shared_metrics
from mutants import stored_table
from repro_tables import amoe_throughputs, claims_of_paper, setup_of_paper
from routing_tables import costs_table, fleet_table, loads_table, queue_table, ranks_table, simulated_queue_table
from scope_tables import refused_fields, vllm_flags
from stored_results import results_table

from moestro.engine.registry import BATCH_POLICIES, EVICT_POLICIES, ORDER_POLICIES, SHARE_POLICIES
from moestro.flow.registry import STEP_POLICIES
from moestro.gateway.resume.request import continued_fields_table
from moestro.placement.contract import PLACE_POLICIES
from moestro.routing.registry import ROUTE_POLICIES
from moestro.text.parsing.output_parser import REASONING_PARSERS, TOOL_PARSERS

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / "docs").glob("*.md"), ROOT / "tests" / "mutants.md"]

_PREFIXES = {
    "prefix_users": "`prefix_users`: as ShareGPT's",
    "prefix_own_texts": "`prefix_own_texts`: only each user's own text repeats",
    "prefix_chats": "`prefix_chats`: conversations",
}
TABLES: dict[str, Callable[[], str]] = {
    "flags of moestro serve": partial(flags_of, "serve"),
    "flags of moestro route": partial(flags_beside, "route", "serve"),
    "metrics with vLLM's names": shared_metrics,
    "other metrics of moestro serve": own_metrics,
    "metrics of moestro route": route_metrics,
    "metrics of a shadow": shadow_metrics,
    "metrics of KV events": kv_event_metrics,
    "fields of resumed streams": continued_fields_table,
    "route policies": ROUTE_POLICIES.table,
    "order policies": ORDER_POLICIES.table,
    "batch policies": BATCH_POLICIES.table,
    "evict policies": EVICT_POLICIES.table,
    "share policies": SHARE_POLICIES.table,
    "step policies": STEP_POLICIES.table,
    "place policies": PLACE_POLICIES.table,
    "tool call parsers": TOOL_PARSERS.table,
    "reasoning parsers": REASONING_PARSERS.table,
    "flags of moestro place": partial(flags_of, "place"),
    "flags of moestro run-batch": partial(flags_of, "run-batch"),
    "flags of moestro chat": partial(flags_of, "chat"),
    "flags of moestro sim": partial(flags_of, "sim"),
    "flags of vLLM": vllm_flags,
    "refused fields": refused_fields,
    "clients": clients_table,
    "agents": agents_table,
    "attacks": attacks_table,
    "mutants": stored_table,
    "compiled kernels": kernel_table.stored_table,
    **{f"claims of {paper}": partial(claims_of_paper, paper) for paper in ("lmetric", "amoe", "gimbal", "qllm")},
    **{f"set-up of {paper}": partial(setup_of_paper, paper) for paper in ("lmetric", "amoe", "gimbal", "qllm")},
    "throughputs of amoe": amoe_throughputs,
    "capacities of lmetric": capacities_table,
    "latencies of lmetric": latencies_table,
    "cells of lmetric in which moestro is worse": worse_table,
    "ages of figures of lmetric": ages_table,
    **{f"shapes of gimbal, {prefix}": partial(shapes_table, prefix) for prefix in ("scarce", "slow")},
    "KV memory of gimbal": kv_memory_table,
    "overload of gimbal": overload_table,
    "stack of gimbal": stack_table,
    "sources of gimbal": sources_table,
    "skew of gimbal": skew_table,
    "routing of gimbal": partial(routing_table, "routing"),
    "routing of gimbal, sources": partial(routing_table, "routing_sources"),
    "routing of gimbal, systems": recorded_systems_table,
    "prefix hits of gimbal": partial(prefixes_table, _PREFIXES),
    "accuracy of systems": summary_table,
    "accuracy of predictions": accuracy_table,
    "estimates of calibrate": estimates_table,
    "host memory of engines": host_memory_table,
    "policies before vLLM": loads_table,
    "costs of routers": costs_table,
    "fleets of routers": fleet_table,
    "simulated queue": simulated_queue_table,
    "queue before vLLM": queue_table,
    "ranks of vLLM": ranks_table,
    "stored results": results_table,
}


def _printed_by(command: str) -> str:
    return f"`{command}` prints this table; the site (`make docs`) has it here."


def _served_by(verb: str) -> str:
    return f"`/metrics` of `{verb}` states type and meaning of each series; the site (`make docs`) has the table here."


def _stored_in(path: str) -> str:
    return f"The site (`make docs`) has this table here; its figures are in [{Path(path).name}](../{path})."


def _set_up_in(paper: str) -> str:
    path = f"../src/moestro/repro/{paper}/paper.py"
    return f"[paper.py]({path}) has the set-up beside the paper's sentences; the site (`make docs`) has the table here."


def _claims_in(paper: str) -> str:
    return (
        f"{claims_of_paper(paper).partition(chr(10))[0]}\n"
        f"[stored_claims.json](../src/moestro/repro/{paper}/stored_claims.json) has each claim beside our figures;\n"
        "the site (`make docs`) has the table here."
    )


# What stands in the repository in place of a long table.
SITE_ONLY = {
    **{
        f"flags of moestro {verb}": _printed_by(f"moestro {verb} --help-all")
        for verb in ("serve", "route", "place", "run-batch", "chat", "sim")
    },
    "metrics with vLLM's names": _served_by("moestro serve"),
    "other metrics of moestro serve": _served_by("moestro serve"),
    "metrics of moestro route": _served_by("moestro route"),
    "metrics of KV events": _served_by("moestro route"),
    "metrics of a shadow": _served_by("moestro route"),
    "fields of resumed streams": (
        "These fields have no exact continuation: several prompts or choices, content other than text, tools,\n"
        "grammars, `seed` unless `temperature` is 0, `stop`, `bad_words`, `presence_penalty`, `frequency_penalty`,\n"
        "log probabilities, beams and `thinking_token_budget`. The site (`make docs`) has the table of all fields here."
    ),
    "flags of vLLM": (
        "The error of a start with such a flag says what to do; the site (`make docs`) has the table here, and "
        "[vllm_flags.py](../src/moestro/config/vllm_flags.py) the declarations."
    ),
    **{f"set-up of {paper}": _set_up_in(paper) for paper in ("lmetric", "amoe", "gimbal", "qllm")},
    **{f"claims of {paper}": _claims_in(paper) for paper in ("lmetric", "qllm")},
    "shapes of gimbal, slow": _stored_in("bench/results/repro/gimbal.json"),
    "latencies of lmetric": _stored_in("bench/results/repro/lmetric.json"),
    "throughputs of amoe": _stored_in("bench/results/repro/amoe.json"),
    "compiled kernels": _stored_in("bench/results/kernels/compiled.json"),
    "accuracy of predictions": _stored_in("bench/results/accuracy"),
    "stored results": "The site (`make docs`) lists the files of [bench/results](../bench/results) here.",
}

_MARKED = re.compile(r"(<!-- generated: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def in_repository(name: str) -> str:
    """The text of a marked place in the repository: its table, or the sentence that says where the table is."""
    return SITE_ONLY[name] if name in SITE_ONLY else TABLES[name]()


def for_site(name: str) -> str:
    """The text of a marked place in the built site: always the table."""
    return TABLES[name]()


def with_tables(text: str, shown: Callable[[str], str] = in_repository) -> str:
    """`text` with what `shown` gives for each marked place, as the code has it now."""
    return _MARKED.sub(lambda found: f"{found[1]}{shown(found[2])}\n{found[3]}", text)


def main() -> int:
    """Write or check every page; returns the exit status."""
    pages = {page: page.read_text() for page in sorted(PAGES)}
    missing = TABLES.keys() - {found[2] for text in pages.values() for found in _MARKED.finditer(text)}
    if missing:
        print(f"no page has a marker for: {', '.join(sorted(missing))}")
        return 1
    outdated = {page: new for page, text in pages.items() if (new := with_tables(text)) != text}
    for page, text in outdated.items():
        if "--check" in sys.argv[1:]:
            print(f"{page.relative_to(ROOT)} is out of date; run: python tools/reference_tables.py")
        else:
            page.write_text(text)
    return int("--check" in sys.argv[1:] and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
