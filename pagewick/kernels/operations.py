"""The operations, one signature each (that of their definition in `reference`), and the table that dispatches them."""

from pagewick.kernels import cpu, reference, triton
from pagewick.kernels.dispatch import Table

TABLE = Table([cpu.BACKEND, triton.BACKEND])

activation = TABLE.operation(reference.activation)
add = TABLE.operation(reference.add)
add_layer_norm = TABLE.operation(reference.add_layer_norm)
add_rms_norm = TABLE.operation(reference.add_rms_norm)
argmax_rows = TABLE.operation(reference.argmax_rows)
combine = TABLE.operation(reference.combine)
dynamic_rotary_angles = TABLE.operation(reference.dynamic_rotary_angles)
fused_moe = TABLE.operation(reference.fused_moe)
gated_activation = TABLE.operation(reference.gated_activation)
gather_rows = TABLE.operation(reference.gather_rows)
grouped_linear = TABLE.operation(reference.grouped_linear)
latent_attention = TABLE.operation(reference.latent_attention)
layer_norm = TABLE.operation(reference.layer_norm)
linear = TABLE.operation(reference.linear)
log_softmax_stats = TABLE.operation(reference.log_softmax_stats)
paged_attention = TABLE.operation(reference.paged_attention)
philox_uniform = TABLE.operation(reference.philox_uniform)
rms_norm = TABLE.operation(reference.rms_norm)
rope_and_store = TABLE.operation(reference.rope_and_store)
rope_and_store_latent = TABLE.operation(reference.rope_and_store_latent)
rotary_angles = TABLE.operation(reference.rotary_angles)
rotary_embedding = TABLE.operation(reference.rotary_embedding)
route = TABLE.operation(reference.route)
sample_tokens = TABLE.operation(reference.sample_tokens)
scale = TABLE.operation(reference.scale)
soft_cap = TABLE.operation(reference.soft_cap)
store_kv = TABLE.operation(reference.store_kv)
