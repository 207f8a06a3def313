"""GPUs as the cost models see them: published peaks, the fractions that kernels reach, and what their memory holds.

Peaks are the vendors' dense figures, without sparsity. Efficiencies are fitted to tables of single operations and never
to the end-to-end figures that judge them. `docs/costs.md` names the table behind each and what it leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moestro.cost.networks import NetworkShape
from moestro.errors import ConfigError

GIB = 1 << 30
PCIE_4, PCIE_5 = 31.5e9, 63.0e9  # 16 lanes of 16 and 32 GT/s, coded 128b/130b; block copies reach less


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU's peaks, efficiencies (fractions of a peak) and fixed delays.

    Attributes:
        name: name in messages and reports.
        memory_bytes: memory that a process finds on it.
        bf16_flops_per_s, fp8_flops_per_s: dense tensor-core peaks; 0 means no FP8 arithmetic: FP8 weights then run at
            the bf16 rate.
        memory_bytes_per_s: peak memory bandwidth.
        link_bytes_per_s: bandwidth to its neighbours in one direction: NVLink, or PCIe without NVLink.
        host_bytes_per_s: bandwidth to host memory in one direction: the peak of PCIe with 16 lanes.
        gemm_memory, gemm_compute: efficiency of a plain matrix product, in memory and arithmetic.
        kv_read: memory efficiency of decode attention.
        prefill_attention: arithmetic efficiency of prefill attention.
        expert_memory, expert_compute: efficiency of the fused experts, in memory and arithmetic.
        expert_overlap: p of (memory^p + compute^p)^(1/p): with 1 the two add; with a large p the longer hides the rest.
        expert_start_ns: start of one call of the fused experts: sorting tokens by expert, launches.
        attention_token_ns: cost of each new prefill token in one layer's attention: KV write, rotary embedding.
        kernel_ns: one small kernel within a CUDA graph.
        all_to_all_start_ns: start of one all-to-all.
    """

    name: str
    memory_bytes: int
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    gemm_memory: float
    gemm_compute: float
    kv_read: float
    prefill_attention: float
    expert_memory: float
    expert_compute: float
    expert_overlap: float
    expert_start_ns: float
    attention_token_ns: float
    kernel_ns: float
    all_to_all_start_ns: float

    def host_copy_ns(self, num_bytes: int) -> int:
        """Time to copy `num_bytes` to or from host memory at the link's peak."""
        return round(num_bytes / self.host_bytes_per_s * 1e9)


# Peaks: NVIDIA's data sheet of the A100 80 GB SXM (no FP8 units); AIConfigurator's a100_sxm.yaml agrees. Experts:
# AIConfigurator's grid of vLLM 0.14 (Qwen3 and Mixtral shapes, 1 to 4,096 tokens). GEMM and attention: its grids, and
# Frontier's grids of an A800, the same chip. All-to-all: NCCL on two GPUs, 10.5 us for small messages.
A100 = Gpu(
    name="a100-80g",
    memory_bytes=80 * GIB,
    bf16_flops_per_s=312e12,
    fp8_flops_per_s=0.0,
    memory_bytes_per_s=2.039e12,
    link_bytes_per_s=300e9,
    host_bytes_per_s=PCIE_4,
    gemm_memory=0.78,
    gemm_compute=0.72,
    kv_read=0.68,
    prefill_attention=0.56,
    expert_memory=0.75,
    expert_compute=0.48,
    expert_overlap=1.0,
    expert_start_ns=31_000,
    attention_token_ns=36,
    kernel_ns=5_000,
    all_to_all_start_ns=12_000,
)

# Peaks: NVIDIA's data sheet of the A100 40 GB SXM, as in AWS's p4d. Efficiencies: those of the 80 GB, the same chip
# with faster memory.
A100_40G = replace(A100, name="a100-40g", memory_bytes=40 * GIB, memory_bytes_per_s=1.555e12)

# Peaks: NVIDIA's data sheet of the H20 (Hopper with fewer SMs and full memory). Efficiencies: the measured model FLOPs
# utilisations that InferSim publishes for this GPU. Delays: the H100's, because no table states others.
H20 = Gpu(
    name="h20-96g",
    memory_bytes=96 * GIB,
    bf16_flops_per_s=148e12,
    fp8_flops_per_s=296e12,
    memory_bytes_per_s=4.0e12,
    link_bytes_per_s=450e9,
    host_bytes_per_s=PCIE_5,
    gemm_memory=0.80,
    gemm_compute=0.88,
    kv_read=0.74,
    prefill_attention=0.88,
    expert_memory=0.84,
    expert_compute=0.75,
    expert_overlap=1.2,
    expert_start_ns=25_000,
    attention_token_ns=12,
    kernel_ns=4_000,
    all_to_all_start_ns=10_000,
)

# Peaks: NVIDIA's data sheet of the H100 SXM 80 GB. Efficiencies: an assumption, carried over from the H200, the same
# chip with faster memory, because no open table of single operations on the H100 was available.
H100 = Gpu(
    name="h100",
    memory_bytes=80 * GIB,
    bf16_flops_per_s=989e12,
    fp8_flops_per_s=1979e12,
    memory_bytes_per_s=3.35e12,
    link_bytes_per_s=450e9,
    host_bytes_per_s=PCIE_5,
    gemm_memory=0.80,
    gemm_compute=0.70,
    kv_read=0.80,
    prefill_attention=0.58,
    expert_memory=0.87,
    expert_compute=0.62,
    expert_overlap=1.19,
    expert_start_ns=26_000,
    attention_token_ns=6,
    kernel_ns=4_000,
    all_to_all_start_ns=9_000,
)

# Peaks: NVIDIA's data sheet of the H200 SXM, and AIConfigurator's h200_sxm.yaml. Efficiencies: its grids of vLLM 0.24
# (experts of Qwen3 and Mixtral shapes, GEMM, attention) and of all-reduce.
H200 = Gpu(
    name="h200",
    memory_bytes=141 * GIB,
    bf16_flops_per_s=989e12,
    fp8_flops_per_s=1979e12,
    memory_bytes_per_s=4.8e12,
    link_bytes_per_s=450e9,
    host_bytes_per_s=PCIE_5,
    gemm_memory=0.80,
    gemm_compute=0.70,
    kv_read=0.80,
    prefill_attention=0.60,
    expert_memory=0.89,
    expert_compute=0.64,
    expert_overlap=1.19,
    expert_start_ns=26_000,
    attention_token_ns=6,
    kernel_ns=4_000,
    all_to_all_start_ns=9_000,
)

# Peaks: NVIDIA's data sheet of the RTX PRO 6000 Blackwell; its neighbours are reached over PCIe. Experts:
# LLMServingSim's profile of single operations on this GPU, 6.15 us for each activated expert of Qwen3-30B-A3B. The
# all-to-all over PCIe (30 us, 28 GB/s) is a guess, because no table has it.
RTX_PRO_6000 = Gpu(
    name="rtx-pro-6000",
    memory_bytes=96 * GIB,
    bf16_flops_per_s=503e12,
    fp8_flops_per_s=1007e12,
    memory_bytes_per_s=1.6e12,
    link_bytes_per_s=28e9,
    host_bytes_per_s=PCIE_5,
    gemm_memory=0.95,
    gemm_compute=0.75,
    kv_read=0.90,
    prefill_attention=0.50,
    expert_memory=0.96,
    expert_compute=0.55,
    expert_overlap=1.2,
    expert_start_ns=28_000,
    attention_token_ns=10,
    kernel_ns=4_000,
    all_to_all_start_ns=30_000,
)

# Peaks: NVIDIA's data sheets of the HGX B200 and the GB200 NVL72, for one GPU; NVLink 5. The GB200's host is behind
# NVLink-C2C. Efficiencies and delays: an assumption, those of the H200, because no open table of single operations on
# Blackwell's data center GPUs was at hand.
B200 = replace(
    H200,
    name="b200",
    memory_bytes=180 * GIB,
    bf16_flops_per_s=2250e12,
    fp8_flops_per_s=4500e12,
    memory_bytes_per_s=8.0e12,
    link_bytes_per_s=900e9,
)
GB200 = replace(
    B200,
    name="gb200",
    memory_bytes=186 * GIB,
    bf16_flops_per_s=2500e12,
    fp8_flops_per_s=5000e12,
    host_bytes_per_s=450e9,
)

# Peaks: AMD's data sheet of the MI300X; seven links of 64 GB/s to its neighbours. Efficiencies and delays: an
# assumption, those of the H200, because no open table of single operations on it was at hand.
MI300X = replace(
    H200,
    name="mi300x",
    memory_bytes=192 * GIB,
    bf16_flops_per_s=1307e12,
    fp8_flops_per_s=2615e12,
    memory_bytes_per_s=5.3e12,
    link_bytes_per_s=448e9,
)

# A worker of `--mode ep` or `async` that computes on two cores of a server: an order of magnitude, not a fit. Beside a
# GPU's, its arithmetic is dear and reading weights is cheap, so that plans level tokens.
CPU = replace(
    H200,
    name="cpu",
    bf16_flops_per_s=0.2e12,
    fp8_flops_per_s=0.0,
    memory_bytes_per_s=20e9,
    link_bytes_per_s=4e9,
    host_bytes_per_s=4e9,
)

GPUS = {gpu.name: gpu for gpu in (A100, A100_40G, H20, H100, H200, B200, GB200, MI300X, RTX_PRO_6000)}
_OTHER_NAMES = {"a100": A100, "h20": H20, "mi300": MI300X, "cpu": CPU}


def gpu_named(name: str) -> Gpu:
    """Look up a GPU by name, in any case.

    Raises:
        ConfigError: the name is unknown.
    """
    gpu = GPUS.get(name.lower()) or _OTHER_NAMES.get(name.lower())
    if gpu is None:
        raise ConfigError(f"no constants for GPU {name!r}; known: {', '.join(GPUS)}")
    return gpu


# Activations of the largest step, CUDA graphs, communication buffers. A worker of a group has as much.
WORKSPACE_BYTES = 6_000_000_000


def kv_blocks(
    network: NetworkShape, gpu: Gpu, block_size: int, *, gpu_memory_utilization: float = 0.9, num_ep_ranks: int = 1
) -> int:
    """Compute the KV blocks that one GPU holds beside its weights.

    Args:
        network, gpu: the network and the GPU that runs it.
        block_size: tokens of a block.
        gpu_memory_utilization: fraction of the GPU's memory that the engine uses (vLLM's name).
        num_ep_ranks: ranks among which the routed experts are spread.

    Raises:
        ConfigError: no block fits.
    """
    weights = network.weight_bytes(num_ep_ranks)
    num_blocks = _blocks_beside(weights, network, gpu, block_size, gpu_memory_utilization)
    if num_blocks < 1:
        raise _does_not_fit(network, gpu, weights, gpu_memory_utilization)
    return num_blocks


def worker_kv_blocks(
    network: NetworkShape, gpu: Gpu, block_size: int, *, num_slots: int = 0, gpu_memory_utilization: float = 0.9
) -> int:
    """Compute the KV blocks of an attention worker.

    Args:
        network, gpu: the network and the GPU that runs the worker.
        block_size: tokens of a block.
        num_slots: routed experts of each layer that the worker holds too; 0 for attention alone.
        gpu_memory_utilization: fraction of the GPU's memory that the engine uses.

    Raises:
        ConfigError: no block fits.
    """
    weights = network.attention_weight_bytes + network.slot_weight_bytes(num_slots)
    num_blocks = _blocks_beside(weights, network, gpu, block_size, gpu_memory_utilization)
    if num_blocks < 1:
        raise _does_not_fit(network, gpu, weights, gpu_memory_utilization)
    return num_blocks


def check_experts_fit(network: NetworkShape, gpu: Gpu, num_slots: int, *, gpu_memory_utilization: float = 0.9) -> None:
    """Check that an expert worker can hold `num_slots` routed experts of each layer.

    Raises:
        ConfigError: the weights leave no workspace.
    """
    weights = network.slot_weight_bytes(num_slots)
    if weights + WORKSPACE_BYTES > gpu.memory_bytes * _checked(gpu_memory_utilization):
        raise ConfigError(
            f"{num_slots} experts of each layer of {network.name} weigh {weights / 1e9:.1f} GB, which do not fit a"
            f" {gpu.name} of {gpu.memory_bytes / 1e9:.1f} GB beside {WORKSPACE_BYTES / 1e9:.0f} GB of workspace at"
            f" gpu_memory_utilization {gpu_memory_utilization}. Spread the experts over more workers."
        )


def _blocks_beside(weights: float, network: NetworkShape, gpu: Gpu, block_size: int, utilization: float) -> int:
    left = gpu.memory_bytes * _checked(utilization) - weights - WORKSPACE_BYTES
    return int(left // (network.kv_bytes_per_token * block_size))


def _checked(utilization: float) -> float:
    if not 0 < utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {utilization}")
    return utilization


def _does_not_fit(network: NetworkShape, gpu: Gpu, weights: float, utilization: float) -> ConfigError:
    return ConfigError(
        f"{network.name} does not fit a {gpu.name}: {weights / 1e9:.1f} GB of weights and"
        f" {WORKSPACE_BYTES / 1e9:.0f} GB of workspace leave no KV cache of {gpu.memory_bytes / 1e9:.1f} GB at"
        f" gpu_memory_utilization {utilization}."
        " Spread its experts over more ranks, or take a larger GPU."
    )
