"""One GPU's share of a network under tensor parallelism, as a separate network that every cost model can price.

Attention is divided by heads, MLPs and experts by their intermediate size, the vocabulary by rows (Megatron-LM,
arXiv 1909.08053). All-reduces are not part of the share.
"""

from __future__ import annotations

from dataclasses import replace

from moestro.cost.networks import AttentionShape, NetworkShape
from moestro.errors import ConfigError


def network_share(network: NetworkShape, num_gpus: int) -> NetworkShape:
    """Return what one of `num_gpus` GPUs computes and holds of every layer.

    With fewer heads of keys and values than GPUs, each GPU holds one head, as in vLLM. Compressed keys and values (MLA)
    and their down-projections are on every GPU.

    Args:
        network: the whole network.
        num_gpus: GPUs of the replica.

    Raises:
        ConfigError: the heads or an intermediate size are not divisible by the number of GPUs.
    """
    experts = network.experts
    num_heads = network.attention.num_heads
    if num_heads % num_gpus:
        raise ConfigError(f"{network.name}: {num_heads} attention heads are not divisible by {num_gpus} GPUs")
    sizes = {group.dense_size for group in network.groups} | ({experts.intermediate_size} if experts else set())
    for size in sorted(sizes):
        if size % num_gpus:
            raise ConfigError(f"{network.name}: an intermediate size of {size} is not divisible by {num_gpus} GPUs")
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // num_gpus)
    return replace(
        network,
        name=f"{network.name}/{num_gpus}",
        vocab_size=-(-network.vocab_size // num_gpus),  # engines pad the vocabulary
        attention=_attention_share(network.attention, num_gpus),
        experts=experts,
        groups=tuple(replace(group, dense_size=group.dense_size // num_gpus) for group in network.groups),
    )


def _attention_share(attention: AttentionShape, num_gpus: int) -> AttentionShape:
    projections: tuple[tuple[int, int], ...]
    kv_bytes = attention.kv_bytes_per_token
    if attention.expand_flops:  # latent attention: queries, latent, up, out
        *lows, (query, low), latent, (up, rank), (hidden, values) = attention.projections
        projections = (*lows, (query // num_gpus, low), latent, (up // num_gpus, rank), (hidden, values // num_gpus))
    else:
        (rows, hidden), (_, query) = attention.projections
        num_kv_heads = attention.num_kv_heads
        kv_share = max(num_gpus, num_kv_heads) // num_gpus / num_kv_heads  # of all heads; at least one head
        kv_rows = round((rows - query) * kv_share)
        projections = ((query // num_gpus + kv_rows, hidden), (hidden, query // num_gpus))
        kv_bytes = round(kv_bytes * kv_share)
    return AttentionShape(
        projections=projections,
        kv_bytes_per_token=kv_bytes,
        num_heads=attention.num_heads // num_gpus,
        decode_flops=attention.decode_flops / num_gpus,
        prefill_flops=attention.prefill_flops / num_gpus,
        expand_flops=attention.expand_flops / num_gpus,
        num_kv_heads=max(attention.num_kv_heads // num_gpus, 1),
    )
