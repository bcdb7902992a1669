"""Building blocks of models, each aware of tensor parallelism: forward(x) or forward(x, batch)."""
