"""Sessions for traces that name none: a request continues the request whose blocks it begins with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moestro.errors import ConfigError
from moestro.workload.rows import Rows


def with_chains(rows: Rows, num_common_blocks: int = 1) -> Rows:
    """Guess sessions: a request joins the session that last held its deepest known block.

    The guess can be wrong: a document that two users ask about makes one session of them.

    Args:
        rows: requests of a trace with hash ids, in order of time.
        num_common_blocks: leading blocks to ignore because every prompt has them. Mooncake's conversation trace has
            one such block.

    Raises:
        ConfigError: the rows have no hash ids.
    """
    if rows.hash_ids is None:
        raise ConfigError("sessions can be guessed only from hash ids, which this trace does not have")
    holder: dict[int, int] = {}
    sessions = []
    for i, ids in enumerate(rows.hash_ids):
        own = ids[num_common_blocks:].tolist()
        sessions.append(next((holder[each] for each in reversed(own) if each in holder), i))
        holder.update(dict.fromkeys(own, sessions[-1]))
    return replace(rows, session=np.unique(sessions, return_inverse=True)[1])
