"""A Ray cluster on this machine: a head without cores, and three nodes with two each, by name.

Prints the head's address. A line of stdin with the beginning of a node's id removes that node; the end of stdin ends
the cluster.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

NUM_NODES = 3
_STORE_BYTES = 80 << 20  # Ray's least


def main() -> None:
    head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [
        cluster.add_node(num_cpus=2, num_gpus=0, object_store_memory=_STORE_BYTES, wait=False) for _ in range(NUM_NODES)
    ]
    cluster.wait_for_nodes(60)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        for node in nodes:
            if node.node_id.startswith(line.strip()):
                cluster.remove_node(node, allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main()
