"""An imitated CUDA graph: operations and launches are kept with their tensors while it is recorded, and run again.

A replay runs nothing of the code that was recorded. Fresh memory is poisoned when it is recorded, so that nothing may
count on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moestro.model.cuda.tiles import replace_launcher


class ImitatedGraph:
    """Implements what is used of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, Any]] = []

    @torch.inference_mode()
    def replay(self) -> None:
        for kind, what in self.steps:
            if kind == "launch":
                launcher, arguments = what
                launcher(*arguments)
                continue
            func, args, kwargs, found = what
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    @property
    def num_launches(self) -> int:
        return sum(kind == "launch" for kind, _ in self.steps)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: ImitatedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        assert "_local_scalar_dense" not in name, "a graph cannot wait for the host"
        assert "nonzero" not in name, "a graph cannot wait for the host"
        found = func(*args, **kwargs)
        if "empty" in name:
            for leaf in tree_leaves(found):
                poison(leaf)
        else:
            self.graph.steps.append(("operation", (func, args, kwargs, found)))
        return found


def poison(tensor: Tensor) -> None:
    """Fill fresh memory with what no test expects."""
    if tensor.numel():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


@contextmanager
def _record(graph: ImitatedGraph, pool: object = None) -> Iterator[None]:
    def launcher(*arguments: Any) -> None:
        graph.steps.append(("launch", (before, arguments)))
        before(*arguments)

    before = replace_launcher(launcher)
    try:
        with _Recorder(graph):
            yield
    finally:
        replace_launcher(before)


def imitate_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch record imitated graphs."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ImitatedGraph)
    monkeypatch.setattr(torch.cuda, "graph", _record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
