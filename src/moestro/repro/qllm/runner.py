"""`moestro repro qllm`: runs it under a progress bar, shows it, and keeps it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from moestro.repro.conditions import this_run
from moestro.repro.lmetric.reporting import Reproduced, bar
from moestro.repro.qllm.claims import claims_of
from moestro.repro.qllm.experiment import Findings, Plan, num_runs, reproduce
from moestro.repro.qllm.show import print_findings


def reproduce_qllm(console: Console, plan: Plan, trace: Path | None) -> Reproduced[Findings]:
    """QLLM's figures and claims, simulated.

    Raises:
        ConfigError: the trace cannot be used.
    """
    conditions = this_run()  # now: the checkout may have changed by the end
    with bar(console) as progress:
        task = progress.add_task("", total=num_runs(plan))
        findings = reproduce(plan, trace, lambda what: progress.update(task, advance=1, description=what))
    claims = claims_of(findings)
    print_findings(console, findings, claims)
    return Reproduced(conditions=conditions, findings=findings, claims=claims)
