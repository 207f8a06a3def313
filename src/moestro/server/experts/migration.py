"""What the control of placement needs of a running group: its table, and moves towards another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moestro.core.experts.expert_table import ExpertTable


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationProgress:
    """State of a migration, or of the last one.

    Attributes:
        num_layers: Layers whose experts move.
        num_committed: Those of them that the group serves by the new table.
        num_bytes: Bytes of weights moved so far.
        is_running: Whether moves go on.
        error: Why the migration ended early; "" means that it did not.
    """

    num_layers: int = 0
    num_committed: int = 0
    num_bytes: int = 0
    is_running: bool = False
    error: str = ""


class Migration(Protocol):
    """Moves the experts of a running group, one layer at a time, while it serves."""

    @property
    def table(self) -> ExpertTable:
        """The table that the whole group serves by now; its slots include empty ones."""
        ...

    @property
    def progress(self) -> MigrationProgress:
        """Progress of the present migration, or of the last one."""
        ...

    def start(self, target: ExpertTable, max_bytes_per_step: int) -> None:
        """Begin to move towards a table, and return at once.

        Args:
            target: Table with the shape of `table`; its version is ignored. Slots of dead workers are not filled.
            max_bytes_per_step: Bytes of weights that a worker sends or takes in between two steps, at most; one expert
                is the least.

        Raises:
            ValueError: A migration is running, or the target does not fit the group; the text says which.
        """
        ...

    def cancel(self) -> None:
        """End the migration after the layer that is being committed. Committed layers stay."""
        ...
