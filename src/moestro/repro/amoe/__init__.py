"""AMoE: Mixtral with multi-query attention on A100s, asynchronous and lock-step expert parallelism, dummy KV.

Throughput and inter-token latency over rates for three length mixes, top-1 and top-2, even and exponential loads of
experts; 16 experts on two machines; step policies; attention workers against expert workers. Each load is a part.
"""
