"""Checkpoints that store one weight in several tensors, such as GPTQ's qweight, qzeros and scales."""
