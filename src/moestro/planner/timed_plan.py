"""A plan over the times of requests: the fewest servers that hold the objectives, and the load that breaks them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moestro import __version__
from moestro.cost.gpus import WORKSPACE_BYTES
from moestro.cost.links import link_named
from moestro.cost.roofline import VLLM_HOST
from moestro.planner.day import DayFigures, DayLoad, ServerChoice, choices_of, figures_of, read_load
from moestro.planner.settings import PlanSettings, unnamed_notes
from moestro.planner.systems import ServedSystem, system_named
from moestro.sim.cluster import Workload
from moestro.sim.groups.group import Prices
from moestro.sim.groups.group_setup import make_prices
from moestro.sim.scenario import Scenario, make_bounds, run
from moestro.sim.settings import PolicySettings
from moestro.workload.rows import RequestForm

_BRACKET = 1.05  # between the load that holds and the one that breaks
_MOST_FACTOR = 64.0


@dataclass(slots=True, eq=False)
class ChoiceFindings:
    """What was found of one kind of server.

    Attributes:
        choice: the server.
        num_servers: servers: the fewest that hold the objectives, or all that the GPUs make.
        figures: figures with them. None means that they were not simulated.
        is_larger: whether one has more GPUs than another kind needs in all.
        load_held, load_broken: multiples of the load that hold and that break the objectives. None means unknown, or
            that none was found within a factor of 64.
        broken_by: what breaks at `load_broken`.
    """

    choice: ServerChoice
    num_servers: int
    figures: DayFigures | None
    is_larger: bool = False
    load_held: float | None = None
    load_broken: float | None = None
    broken_by: str | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs of all servers."""
        return self.num_servers * self.choice.num_gpus

    @property
    def holds(self) -> bool:
        """Whether the objectives hold at the given load."""
        return self.figures is not None and self.figures.broken is None


@dataclass(slots=True, eq=False)
class TimedSearch:
    """Simulates numbers of servers and multiples of the load.

    Args:
        settings: the question.
        system: the server whose scheduler is simulated.
        load: the requests.
        seconds_left: returns the seconds that are left. The answer decides only which simulations are made.
        on_step: receives a line about each step, for a progress bar.
    """

    settings: PlanSettings
    system: ServedSystem
    load: DayLoad
    seconds_left: Callable[[], float] = lambda: math.inf
    on_step: Callable[[str], None] = lambda _: None
    _runs: dict[tuple[str, int, float], DayFigures] = field(default_factory=dict)
    _prices: dict[str, Prices] = field(default_factory=dict)
    _workloads: dict[RequestForm, Workload] = field(default_factory=dict)

    def run(self, choices: Sequence[ServerChoice]) -> list[ChoiceFindings]:
        """Return what was found of each kind of server, the best first.

        The best needs the fewest GPUs, and of those with equally many it holds the highest load. Where the number of
        GPUs is given, it is the one that holds the highest load. Where none holds the objectives, it is the nearest.
        """
        is_fewest = self.settings.finds == "fewest-gpus"
        found, least = [], self.settings.hardware.num_gpus
        for choice in sorted(choices, key=lambda each: each.num_gpus):
            found.append(self._fewest(choice, least) if is_fewest else self._all_gpus(choice))
            least = min(least, found[-1].num_gpus) if found[-1].holds else least
        simulated = [each for each in found if each.figures is not None]
        best = [each for each in simulated if not is_fewest or (each.holds and each.num_gpus == least)]
        for each in () if self.load.is_at_once else best or sorted(simulated, key=_excess)[:1]:
            self._find_limit(each)
        return sorted(
            found,
            key=lambda each: (
                not each.holds,
                each.figures is None,
                each.num_gpus if is_fewest and each.holds else 0,
                -(each.load_held or 0),
                _excess(each),
            ),
        )

    @property
    def _is_late(self) -> bool:
        return self.seconds_left() <= 0

    def figures(self, choice: ServerChoice, num_servers: int, factor: float = 1.0) -> DayFigures:
        """Simulate a number of servers at a multiple of the load, unless this was done before."""
        key = (choice.title, num_servers, factor)
        if key not in self._runs:
            self.on_step(f"{num_servers} x {choice.title}" + ("" if factor == 1 else f", load {factor:.2f}"))
            self._runs[key] = self._simulate(choice, num_servers, factor)
        return self._runs[key]

    def _simulate(self, choice: ServerChoice, num_servers: int, factor: float) -> DayFigures:
        engines = replace(choice.engines, count=num_servers)
        form = RequestForm(
            block_size=engines.block_size,
            names_blocks=engines.enable_prefix_caching,
            max_total_tokens=engines.max_model_len,
        )
        if choice.title not in self._prices:
            self._prices[choice.title] = make_prices(engines)
        if form not in self._workloads:
            self._workloads[form] = self.load.workload(form)
        scenario = Scenario(
            workload=self._workloads[form],
            arrivals=self.load.arrivals(factor),
            engines=engines,
            bounds=make_bounds(engines),
            prices=self._prices[choice.title],
            source=self.load.source,
            is_generated=self.load.is_generated,
            seed=self.settings.search.seed,
        )
        policy = PolicySettings(batch_policy=self.system.batch_policy)
        return figures_of(run(scenario, policy), self.settings.objectives)

    def notes(self) -> list[str]:
        """Return what limits the prices of these runs."""
        return list(dict.fromkeys(note for prices in self._prices.values() for note in prices.notes()))

    # --- numbers of servers -----------------------------------------------------------------------------------------

    def _all_gpus(self, choice: ServerChoice) -> ChoiceFindings:
        number = self.settings.hardware.num_gpus // choice.num_gpus
        return ChoiceFindings(choice, number, None if self._is_late else self.figures(choice, number))

    def _fewest(self, choice: ServerChoice, num_gpus: int) -> ChoiceFindings:
        """Double the servers until they hold the objectives or use `num_gpus`, then bisect."""
        most, low, high = num_gpus // choice.num_gpus, 0, 1
        if not most:
            return ChoiceFindings(choice, 1, None, is_larger=True)
        while True:
            if self._is_late:
                return ChoiceFindings(choice, high, None)
            if self.figures(choice, high).broken is None:
                break
            low = high
            if high == most:
                return ChoiceFindings(choice, most, self.figures(choice, most))
            high = min(2 * high, most)
        while high - low > 1 and not self._is_late:
            middle = (low + high) // 2
            low, high = (low, middle) if self.figures(choice, middle).broken is None else (middle, high)
        return ChoiceFindings(choice, high, self.figures(choice, high))

    # --- multiples of the load --------------------------------------------------------------------------------------

    def _find_limit(self, found: ChoiceFindings) -> None:
        """Find the multiples of the load between which the objectives break."""
        held, broken = (1.0, None) if found.holds else (None, 1.0)
        while not self._is_late:
            factor = _next_factor(held, broken)
            if factor is None:
                break
            if self.figures(found.choice, found.num_servers, factor).broken is None:
                held = factor
            else:
                broken = factor
        found.load_held, found.load_broken = held, broken
        if broken is not None:
            found.broken_by = self.figures(found.choice, found.num_servers, broken).broken


def _excess(found: ChoiceFindings) -> float:
    return math.inf if found.figures is None or found.figures.excess is None else found.figures.excess


def _next_factor(held: float | None, broken: float | None) -> float | None:
    """Return the next multiple of the load to try. None means that the bracket is narrow or the factor extreme."""
    if broken is None:
        assert held is not None, "one of them is known"
        return 2 * held if held < _MOST_FACTOR else None
    if held is None:
        return broken / 2 if broken > 1 / _MOST_FACTOR else None
    return math.sqrt(held * broken) if broken > held * _BRACKET else None


class PlannedServers(msgspec.Struct, frozen=True, kw_only=True):
    """Servers of one kind.

    Attributes:
        title: short name of the server.
        gpus_per_server, num_servers: GPUs of one, and servers.
        holds: whether they hold the objectives.
        is_larger: whether one server has more GPUs than another kind needs in all, so that it was not simulated.
        figures: figures at the given load. None means that it was not simulated.
        load_held, load_broken, broken_by: multiples of the load that hold and that break the objectives, and what
            breaks. None means unknown.
    """

    title: str
    gpus_per_server: int
    num_servers: int
    holds: bool
    is_larger: bool
    figures: DayFigures | None
    load_held: float | None
    load_broken: float | None
    broken_by: str | None

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.gpus_per_server * self.num_servers


class TimedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `moestro plan` over the times of requests.

    Attributes:
        kind: kind of evidence.
        settings: settings as given.
        system, system_version: the server of the commands, and its version whose flags were checked.
        requests: the requests, in words.
        servers: kinds of servers that fit, the best first.
        commands: commands that start the best one. Empty means that none holds the objectives.
        misfits: why others do not fit, by title.
        assumptions: what decides the figures, and what is left out.
    """

    kind: str = "simulated"
    moestro: str = __version__
    settings: object
    system: str
    system_version: str
    requests: str
    servers: list[PlannedServers]
    commands: list[str]
    misfits: dict[str, str]
    assumptions: list[str]


def plan_over_time(
    settings: PlanSettings, seconds_left: Callable[[], float], on_step: Callable[[str], None]
) -> TimedPlan:
    """Answer the question of `settings`.

    Args:
        seconds_left: returns the seconds that are left for simulations.
        on_step: receives a line about each step.

    Raises:
        ConfigError: a name is unknown, a file cannot be read, or the server's version lacks a flag.
    """
    system = system_named(settings.serving.system, settings.serving.for_version)
    link_named(settings.hardware.link_across)
    load = read_load(settings)
    choices, misfits = choices_of(settings, system, load)
    search = TimedSearch(settings, system, load, seconds_left, on_step)
    found = search.run(choices)
    best = found[0] if found and found[0].holds else None
    return TimedPlan(
        settings=msgspec.to_builtins(settings, enc_hook=str),
        system=system.name,
        system_version=__version__ if system.flags is None else system.flags.version,
        requests=load.words,
        servers=[_planned(each) for each in found],
        commands=[] if best is None else best.choice.commands(system, best.num_servers, settings),
        misfits=misfits,
        assumptions=_assumptions(
            settings, system, load, [*(note for each in choices for note in each.notes), *search.notes()]
        ),
    )


def _planned(found: ChoiceFindings) -> PlannedServers:
    return PlannedServers(
        title=found.choice.title,
        gpus_per_server=found.choice.num_gpus,
        num_servers=found.num_servers,
        holds=found.holds,
        is_larger=found.is_larger,
        figures=found.figures,
        load_held=found.load_held,
        load_broken=found.load_broken,
        broken_by=found.broken_by,
    )


def _assumptions(settings: PlanSettings, system: ServedSystem, load: DayLoad, notes: Sequence[str]) -> list[str]:
    hardware = settings.hardware
    lines = [
        f"Means hold in each window of {settings.objectives.window:g} s; P99 of TTFT holds over all requests.",
        "A multiple of the load has the same requests, closer together.",
        f"Steps are formed by {system.batch_policy}, as {system.title} does by default.",
        "Requests go to servers by the policy moestro, with load figures that are current.",
    ]
    if settings.is_calibrated:
        lines.append(f"Steps, KV cache and limits are those that moestro calibrate found ({settings.model}).")
        if hardware.is_other_gpu:
            lines.append(
                f"On {hardware.gpu}, a step takes as much longer or shorter than on {hardware.calibrated_gpu} as the"
                f" rooflines of {hardware.network} say, and the KV cache grows with what is left beside the weights."
            )
    else:
        host = f"{VLLM_HOST.step_ns / 1e6:g} ms a step and {VLLM_HOST.sequence_ns / 1e3:g} us a sequence"
        workspace = f"{WORKSPACE_BYTES / 1e9:.0f} GB of it are workspace"
        lines += [
            f"Steps are priced by the roofline of {hardware.gpu} in docs/costs.md, host: {host}.",
            "Inside a tensor-parallel engine (TP), two all-reduces a layer are priced.",
            f"A GPU may use {hardware.gpu_memory_utilization:g} of its memory; {workspace}.",
            "Experts that are spread (EP) have even loads, as EPLB aims at, and an all-to-all as DeepEP's.",
        ]
    return [
        *lines,
        "Not modelled: the API server beyond what was calibrated, pipeline parallelism, speculative decoding.",
        "Not modelled: separate prefill GPUs, failures, servers that start and stop with the load.",
        *unnamed_notes(settings),
        *load.notes,
        *notes,
    ]


# --- shown ------------------------------------------------------------------------------------------------------------


def print_timed_plan(console: Console, plan: TimedPlan) -> None:
    """Print the answer, the table of servers, the commands and the assumptions."""

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    line(plan.requests)
    if plan.servers:
        console.print(_table(plan.servers))
        line("load: multiple of the load that it holds. larger: another kind needs fewer GPUs than one of these has.")
    for title, reason in plan.misfits.items():
        line(f"does not fit: {title}: {reason}")
    for sentence in sentences(plan):
        line(sentence)
    if plan.commands:
        line(f"Start (flags of {plan.system} {plan.system_version}):")
        for command in plan.commands:
            line(f"    {command}")
    line("Assumptions (all figures are simulated):")
    for sentence in plan.assumptions:
        line(f"- {sentence}")


def sentences(plan: TimedPlan) -> list[str]:
    """Return the sentences that answer the question."""
    if not plan.servers:
        return ["No server fits: take a GPU with more memory, more GPUs, or shorter requests"]
    best = plan.servers[0]
    if best.figures is None:
        return ["The time did not suffice for a single run: raise --time"]
    number = f"{best.num_servers} x {best.title}"
    found = _answer(best, best.figures, number) if best.holds else _miss(best, best.figures, number)
    late = [each.title for each in plan.servers if each.figures is None and not each.is_larger]
    return [*found, f"The time did not suffice for {', '.join(late)}: raise --time"] if late else found


def _miss(best: PlannedServers, figures: DayFigures, number: str) -> list[str]:
    found = [f"The objectives do not hold with {number}: {figures.broken}"]
    if best.load_held is not None:
        found.append(f"{best.load_held:.3g} times this load would hold")
    elif best.load_broken is not None and best.load_broken <= 1 / _MOST_FACTOR:
        found.append(f"At {best.load_broken:.3g} times this load, {best.broken_by}: more of these servers do not help")
    return found


def _answer(best: PlannedServers, figures: DayFigures, number: str) -> list[str]:
    busiest = figures.busiest
    found = [
        f"{number}: TTFT {figures.ttft_ms:,.0f} ms (P99 {figures.ttft_p99_ms:,.0f}), ITL {figures.itl_ms:,.1f} ms",
        f"Longest mean TTFT: {busiest.ttft_ms:,.0f} ms, of requests that arrive {busiest.words}",
    ]
    if best.load_held is None:
        return found
    held = f"It holds {best.load_held:.3g} times this load"
    if best.load_broken is None:
        return [*found, f"{held}; the load that breaks it was not found"]
    return [*found, f"{held}. At {best.load_broken:.3g} times, {best.broken_by}"]


def _table(servers: Sequence[PlannedServers]) -> Table:
    table = Table(
        title="Servers over the times of the requests, simulated",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("servers", no_wrap=True)
    for name in ("GPUs", "TTFT ms", "P99", "ITL ms", "tokens/s", "hits", "load"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in servers:
        figures = each.figures
        shown = ["-"] * 5
        if figures is not None:
            shown = [
                f"{figures.ttft_ms:,.0f}", f"{figures.ttft_p99_ms:,.0f}", f"{figures.itl_ms:,.1f}",
                f"{figures.tokens_per_s:,.0f}", f"{figures.hit_ratio:.3f}",
            ]  # fmt: skip
        held = "-" if each.load_held is None else f"{each.load_held:.3g}"
        missing = "larger" if each.is_larger else "not reached"
        word = missing if figures is None else "" if each.holds else "missed"
        table.add_row(f"{each.num_servers} x {each.title}", str(each.num_gpus), *shown, held, word)
    return table
