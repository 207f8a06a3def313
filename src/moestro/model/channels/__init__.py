"""Channels for tensors between processes: gloo between hosts, NCCL between GPUs."""
