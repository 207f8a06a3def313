from __future__ import annotations

from functools import cache

import pytest
from parity import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function: the directory of a family's tiny checkpoint, made once."""

    @cache
    def make(name: str):
        return tiny.save_checkpoint(tmp_path_factory.mktemp(name), tiny.make_config(name))

    return make
