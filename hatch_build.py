"""Compiles the C++ libraries into a wheel where a compiler is at hand; without one the wheel is for any machine."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_COMPILER = Path("src/moestro/native/compiler.py")


class KernelBuildHook(BuildHookInterface):
    """Adds the compiled libraries of each instruction set to a wheel that is no editable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are collected."""
        root = Path(self.root)
        compiler = _load_compiler(root / _COMPILER)
        for source in compiler.LIBRARIES:
            for stale in source.prebuilt.glob(f"{source.name}-*.so"):
                stale.unlink()
        if version == "editable":
            return
        for source in compiler.LIBRARIES:
            try:
                for chosen in filter(compiler.accepts, source.built_sets()):
                    compiler.compile_library(source, chosen, source.prebuilt)
            except compiler.CompilerError as error:
                self.app.display_warning(f"The wheel lacks the {source.title}: {error}")
                continue
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"].append(f"{source.prebuilt.relative_to(root)}/{source.name}-*.so")


def _load_compiler(path: Path) -> Any:
    # The package itself cannot be imported: its dependencies are absent during a build.
    spec = importlib.util.spec_from_file_location("library_compiler", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module
