"""Compiles the CPU kernels into a wheel where a C++ compiler is at hand; without one the wheel is for any machine."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_KERNELS = Path("src/moestro/model/kernels")


class KernelBuildHook(BuildHookInterface):
    """Adds the compiled kernels of each instruction set to a wheel that is no editable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are collected."""
        compiler = _load_compiler(Path(self.root) / _KERNELS / "compiler.py")
        folder = Path(self.root) / _KERNELS / "prebuilt"
        for stale in folder.glob("kernels-*.so"):
            stale.unlink()
        if version == "editable":
            return
        try:
            for chosen in compiler.built_sets():
                compiler.compile_kernels(chosen, folder)
        except compiler.CompilerError as error:
            self.app.display_warning(f"The wheel has no compiled CPU kernels: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(f"{_KERNELS}/prebuilt/kernels-*.so")


def _load_compiler(path: Path) -> Any:
    # The package itself cannot be imported: its dependencies are absent during a build.
    spec = importlib.util.spec_from_file_location("kernel_compiler", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module
