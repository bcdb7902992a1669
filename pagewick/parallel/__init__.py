"""Several processes, one model: topology (who), layout (who does what), collectives (how they talk), launch (start).

Ranks are laid out as data x pipeline x tensor; today's engine uses the tensor axis only: every rank holds a shard of
each layer. This file imports nothing, so that `topology` and `layout` can be used without torch.
"""
