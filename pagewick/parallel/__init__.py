"""Several processes, one model: topology (who), collectives (how they talk), launch (how they start).

Tensor parallelism only: every rank holds a shard of each layer. This file imports nothing, so that `topology`
can be used without torch.
"""
