"""The map: where asynchrony, overlap, disaggregation or plain replicas win.

One testbed, and one change of it at a time: skew of experts, redundant experts, network, slow GPUs, jitter, host cost,
lengths, number of experts. Throughput within bounds on ITL, with several seeds. Each change is a load.
"""
