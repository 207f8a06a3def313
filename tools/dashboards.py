"""Writes the Grafana boards and Prometheus' alert rules of deploy/ from the declarations below.

    python tools/dashboards.py           # write
    python tools/dashboards.py --check   # only whether the files are current; the exit status is 1 if not

`$__rate_interval` is Grafana's. Panels of engines read vLLM's names, so that they show vLLM's servers
too; the others read Moestro's own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
BOARDS_DIR = ROOT / "deploy" / "grafana"
RULES_FILE = ROOT / "deploy" / "prometheus" / "rules.yml"
_HEIGHT, _WIDTH, _COLUMNS = 8, 12, 2
METRIC = re.compile(r"(?:moestro|vllm):\w+")


@dataclass(frozen=True)
class Panel:
    """A panel of time series.

    Attributes:
        series: PromQL expressions by legend, in Grafana's form (`{{engine}}`).
        unit: Grafana's name of the unit.
        about: what the panel shows, for its tooltip.
    """

    title: str
    unit: str
    about: str
    series: dict[str, str]


@dataclass(frozen=True)
class Board:
    """A dashboard, with a variable for the data source."""

    name: str
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Alert:
    """A rule that pages a person.

    Attributes:
        lasts: time for which the expression must hold.
        summary: what is wrong, with Prometheus' labels.
        action: what to do first.
    """

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str
    action: str


def rate(metric: str, by: str = "") -> str:
    """Sum of a counter's rates, by labels if any."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}[$__rate_interval]))"


def quantile(share: float, histogram: str, by: str = "") -> str:
    """A quantile of a histogram, by labels if any."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket[$__rate_interval])))"


def _quantiles(histogram: str, by: str = "") -> dict[str, str]:
    legend = "".join(f" {{{{{label}}}}}" for label in by.split(", ") if label)
    return {f"P50{legend}": quantile(0.5, histogram, by), f"P99{legend}": quantile(0.99, histogram, by)}


ROUTE = "moestro:route_"
FLEET = Board(
    "fleet",
    "Moestro: fleet",
    (
        Panel(
            "Requests",
            "reqps",
            "Requests for engines, and those that the router refused or cut off.",
            {"requests": rate(f"{ROUTE}requests_total"), "refused": f"({rate(f'{ROUTE}refused_total')}) or vector(0)"},
        ),
        Panel(
            "Engines in rotation",
            "short",
            "Engines that get requests, of all engines.",
            {"ready": f"sum({ROUTE}engine_ready)", "all": f"count({ROUTE}engine_ready)"},
        ),
        Panel(
            "First byte",
            "s",
            "Arrival to the first byte of the answer's body.",
            _quantiles(f"{ROUTE}first_byte_seconds"),
        ),
        Panel(
            "Answers by status",
            "reqps",
            "Answers of all engines by HTTP status.",
            {"{{status}}": rate(f"{ROUTE}answers_total", "status")},
        ),
        Panel("In flight", "short", "Requests on each engine.", {"{{engine}}": f"{ROUTE}in_flight"}),
        Panel(
            "Imbalance",
            "short",
            "Maximum over mean of the requests in flight on engines in rotation.",
            {"maximum over mean": f"{ROUTE}imbalance"},
        ),
        Panel(
            "Retries and broken answers",
            "reqps",
            "Requests that another engine got, answers that broke off, and retries that the budget denied.",
            {
                "retries": f"({rate(f'{ROUTE}retries_total')}) or vector(0)",
                "broken": rate(f"{ROUTE}broken_answers_total"),
                "denied": rate(f"{ROUTE}retries_denied_total"),
            },
        ),
        Panel(
            "Clients",
            "cps",
            "Clients that left before the end of their answer, and faults of their connections.",
            {
                "left": rate(f"{ROUTE}clients_left_total"),
                "faults": f"({rate(f'{ROUTE}connection_faults_total')}) or vector(0)",
            },
        ),
    ),
)
DECISIONS = Board(
    "decisions",
    "Moestro: router decisions",
    (
        Panel(
            "Decisions",
            "reqps",
            "Requests given to each engine.",
            {"{{engine}}": rate(f"{ROUTE}decisions_total", "engine")},
        ),
        Panel("Duration of a decision", "s", "Time that the policy takes.", _quantiles(f"{ROUTE}decision_seconds")),
        Panel(
            "Prompt tokens from a cache",
            "percentunit",
            "Share of prompt tokens that the router expected in the engine's cache, and that the engine reported.",
            {
                "expected": f"{rate(f'{ROUTE}predicted_hit_tokens_total')} / {rate(f'{ROUTE}prompt_tokens_total')}",
                "reported": f"{rate(f'{ROUTE}hit_tokens_total')} / {rate(f'{ROUTE}prompt_tokens_total')}",
            },
        ),
        Panel(
            "Prompt tokens",
            "short",
            "Prompt tokens by engine.",
            {"{{engine}}": rate(f"{ROUTE}prompt_tokens_total", "engine")},
        ),
        Panel(
            "Blocks known by KV events", "short", "Blocks that each engine holds.", {"{{engine}}": f"{ROUTE}kv_blocks"}
        ),
        Panel(
            "Delay of KV events",
            "s",
            "Delay of the newest batch from its time stamp to its arrival.",
            {"{{engine}}": f"{ROUTE}kv_lag_seconds"},
        ),
        Panel(
            "Whole caches known",
            "short",
            "1 while the router knows all blocks that the engine holds.",
            {"{{engine}}": f"{ROUTE}kv_complete"},
        ),
        Panel("Prefix index", "bytes", "Approximate memory of the prefix index.", {"index": f"{ROUTE}index_bytes"}),
        Panel(
            "Sources that are missing",
            "short",
            "Figures that the policy reads and an engine does not supply.",
            {"{{engine}} {{source}}": f"{ROUTE}source_missing or vector(0)"},
        ),
        Panel(
            "Moved away",
            "reqps",
            "Requests that were retried elsewhere.",
            {"{{engine}}": rate(f"{ROUTE}retried_away_total", "engine")},
        ),
    ),
)
ENGINE = Board(
    "engine",
    "Moestro: engine and batch",
    (
        Panel(
            "Running and waiting",
            "short",
            "Requests that hold KV, and that wait for it.",
            {
                "running {{engine}}": "sum by (engine) (vllm:num_requests_running)",
                "waiting {{engine}}": "sum by (engine) (vllm:num_requests_waiting)",
            },
        ),
        Panel(
            "KV cache",
            "percentunit",
            "Share of KV blocks held by requests.",
            {"{{engine}}": "vllm:kv_cache_usage_perc"},
        ),
        Panel("Time to first token", "s", "From arrival.", _quantiles("vllm:time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", "Gap between two tokens.", _quantiles("vllm:inter_token_latency_seconds")),
        Panel(
            "Tokens",
            "short",
            "Tokens a second of prompts and of answers.",
            {"prompt": rate("vllm:prompt_tokens_total"), "generated": rate("vllm:generation_tokens_total")},
        ),
        Panel(
            "Prefix cache",
            "percentunit",
            "Share of looked-up prompt tokens that were found.",
            {
                "{{engine}}": f"{rate('vllm:prefix_cache_hits_total', 'engine')}"
                f" / {rate('vllm:prefix_cache_queries_total', 'engine')}"
            },
        ),
        Panel("Queue", "s", "From arrival to the first admission.", _quantiles("vllm:request_queue_time_seconds")),
        Panel("End to end", "s", "From arrival to the last token.", _quantiles("vllm:e2e_request_latency_seconds")),
        Panel(
            "Preemptions",
            "cps",
            "Preemptions of requests.",
            {"{{engine}}": rate("vllm:num_preemptions_total", "engine")},
        ),
        Panel("Tokens of a step", "short", "Size of a batch.", _quantiles("vllm:iteration_tokens_total")),
        Panel(
            "Time to first token by class",
            "s",
            "Latency-sensitive (ls) and best-effort (be) requests.",
            _quantiles("moestro:time_to_first_token_seconds", "service_class"),
        ),
        Panel(
            "Trouble",
            "cps",
            "Restarts and stalls of engines.",
            {"restarts": rate("moestro:engine_restarts_total"), "stalls": rate("moestro:engine_stalls_total")},
        ),
    ),
)
EXPERTS = Board(
    "experts",
    "Moestro: experts and placement",
    (
        Panel(
            "Balance of experts",
            "percentunit",
            "Mean load of a layer's experts over the largest: the mean of all layers, and the worst layer.",
            {"mean": "moestro:expert_balance", "worst layer": "moestro:expert_balance_min"},
        ),
        Panel(
            "Balance of workers",
            "percentunit",
            "Mean load of the workers over the largest, now and as the last plan predicted.",
            {
                "now {{definition}}": "moestro:placement_balance",
                "predicted {{definition}}": "moestro:placement_balance_predicted",
            },
        ),
        Panel(
            "Pressure",
            "short",
            "Load of the workers that compute an engine's experts.",
            {"{{engine}}": "moestro:expert_pressure"},
        ),
        Panel(
            "Visits at home",
            "percentunit",
            "Share of an engine's visits that experts on its own device compute.",
            {"{{engine}}": "moestro:expert_local_share"},
        ),
        Panel(
            "Visits to experts",
            "short",
            "Visits a second.",
            {"{{engine}}": rate("moestro:expert_visits_total", "engine")},
        ),
        Panel(
            "Weights that moved",
            "Bps",
            "Bytes of weights that moved.",
            {"moved": rate("moestro:placement_moved_bytes_total")},
        ),
        Panel(
            "Decisions",
            "cps",
            "Decisions about the placement by outcome.",
            {"{{outcome}}": rate("moestro:placement_decisions_total", "outcome")},
        ),
        Panel(
            "State",
            "short",
            "Version of the table; 1 while experts move, while a plan stands still, and while an operator holds all.",
            {
                "version": "moestro:placement_table_version",
                "migrating": "moestro:placement_migrating",
                "stalled": "moestro:placement_stalled",
                "frozen": "moestro:placement_frozen",
            },
        ),
        Panel(
            "Steps without tokens",
            "percentunit",
            "Share of a group's steps to which an engine brought no tokens.",
            {
                "{{engine}}": f"{rate('moestro:group_idle_steps_total', 'engine')}"
                f" / {rate('moestro:group_steps_total', 'engine')}"
            },
        ),
        Panel(
            "Passed over", "short", "Tokens of be requests passed over now.", {"{{engine}}": "moestro:parked_tokens"}
        ),
    ),
)
BOARDS = (FLEET, DECISIONS, ENGINE, EXPERTS)

ALERTS = (
    Alert(
        "MoestroEngineDown",
        f"{ROUTE}engine_ready == 0",
        "1m",
        "warning",
        "Engine {{ $labels.engine }} gets no requests.",
        "The admin plane's /admin/engines names the cause; the engine's own log has the rest.",
    ),
    Alert(
        "MoestroNoEngine",
        f"sum({ROUTE}engine_ready) == 0",
        "15s",
        "critical",
        "No engine gets requests: every request is refused with 503.",
        "Look at /admin/engines of the router, and at the network between it and its engines.",
    ),
    Alert(
        "MoestroKvEventsIncomplete",
        f"{ROUTE}kv_complete == 0",
        "10m",
        "warning",
        "The router does not know the whole cache of {{ $labels.engine }}.",
        f"{ROUTE}kv_losses_total and the router's log say why; a replay endpoint (--kv-replay) mends lost messages.",
    ),
    Alert(
        "MoestroSourceMissing",
        f"{ROUTE}source_missing == 1",
        "5m",
        "warning",
        "Engine {{ $labels.engine }} does not supply {{ $labels.source }}, which the route policy reads.",
        "Check the engine's version and --metrics-interval, or choose a policy that does not need the figure.",
    ),
    Alert(
        "MoestroRefusals",
        f"sum(rate({ROUTE}refused_total[5m])) > 0.05 * sum(rate({ROUTE}requests_total[5m]))",
        "5m",
        "critical",
        "More than 5 % of the requests are refused.",
        f"{ROUTE}refused_total names the reasons: full queues need engines, other reasons need a look at the clients.",
    ),
    Alert(
        "MoestroEngineRestarts",
        "increase(moestro:engine_restarts_total[15m]) > 2",
        "0m",
        "critical",
        "Engine {{ $labels.engine }} restarted more than twice in 15 minutes.",
        "The server's log has the last lines of each process that ended.",
    ),
    Alert(
        "MoestroStarvation",
        "rate(moestro:passed_over_seconds_total[5m]) > 0.9",
        "5m",
        "warning",
        "Best-effort requests on engine {{ $labels.engine }} are passed over nearly all the time.",
        "Set --max-be-wait, or add engines: latency-sensitive requests take the whole device.",
    ),
    Alert(
        "MoestroPlacementStalled",
        "moestro:placement_stalled == 1",
        "1m",
        "warning",
        "A migration of experts or a planning policy stands still.",
        "POST /admin/placement/cancel ends it; GET /admin/placement shows where it stands.",
    ),
    Alert(
        "MoestroDeliveryErrors",
        "increase(moestro:delivery_errors_total[15m]) > 0",
        "0m",
        "warning",
        "The server failed to process a message of an engine, and ended the affected requests.",
        "The log has the traceback: report it.",
    ),
)


def board_of(board: Board) -> dict[str, object]:
    """Return a dashboard as Grafana imports it."""
    return {
        "uid": f"moestro-{board.name}",
        "title": board.title,
        "tags": ["moestro"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel_of(place, panel) for place, panel in enumerate(board.panels)],
    }


def _panel_of(place: int, panel: Panel) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    row, column = divmod(place, _COLUMNS)
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend, "datasource": source}
            for number, (legend, expression) in enumerate(panel.series.items())
        ],
    }


def rules() -> dict[str, object]:
    """Return the alert rules as Prometheus reads them."""
    return {
        "groups": [
            {
                "name": "moestro",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expression,
                        "for": alert.lasts,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "description": alert.action},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


def files() -> dict[Path, str]:
    """Return the text of every generated file."""
    found = {BOARDS_DIR / f"{board.name}.json": json.dumps(board_of(board), indent=1) + "\n" for board in BOARDS}
    found[RULES_FILE] = "# Written by tools/dashboards.py.\n" + yaml.safe_dump(rules(), sort_keys=False, width=1000)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; the exit status is 1 if a file is old")
    is_check = parser.parse_args().check
    old = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    for path in old:
        if is_check:
            print(f"{path.relative_to(ROOT)} is out of date; run: python tools/dashboards.py")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path])
    return int(is_check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
