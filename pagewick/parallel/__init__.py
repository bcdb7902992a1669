"""Several processes for one model: topology (who am I), layout (tasks), collectives (communication), launch (start).

Ranks are laid out as data x pipeline x tensor. The engine uses the last two: a rank holds a shard of each layer of its
stage. This file imports nothing, so that `topology` and `layout` can be used without torch.
"""
