"""The memory that the largest step needs on a rank beside weights and KV cache, by arithmetic. Imports no torch.

Nothing is run to find it out: a profiling pass would take seconds at every start, and would see one batch only. With T
tokens in the largest step, S rows of logits, H = hidden_size, I = intermediate_size, A experts of a token, V =
vocab_size, R ranks of tensor parallelism and e bytes of a number, the activations are

    hidden states    T * 4 H * e                 residual, norm, output of a layer, and a sum of both; 2 H more where
                                                 residuals are in float32
    widest layer     T * w * e, the largest w of
                       attention                 (3 query heads + 2 KV heads) * head_dim / R; 4 query heads if gates
                                                 are made with the queries
                       latent attention          query heads * 2 latents / R
                       gated delta rule          (3 channels + 2 value heads * value_dim + 4 key heads * key_dim
                                                 + 264 value heads) / R, on a CPU a little less; Mamba-2 alike; with
                                                 decays of channels 7 key heads * key_dim, and the vectors that these
                                                 and gates come from; in float16 4 or 6 key heads * key_dim more
                       MLP                       3 I / R; 4 I / R with sparse gates
                       experts                   3 (A * I + shared I) / R + A * H; 2 (...) without gates, and with
                                                 latents of size L (A + 2) * L in place of A * H
    adapters         T * w * e more, with LoRA adapters: the change of a layer's output, and the inner product
    FP8 activations  T * w * 5 with --fp8-activations: products in float32, and activations of a byte
    inputs of layers T * 3 n * e, for n numbers of all layers together, in models that have such inputs
    streams          T * 3 s H * e, in models with s residual streams: those that a layer gets, predicts and returns
    predicting       T * 6 H * e, with a layer that predicts further tokens: what it reads, the model's output and the
                     embeddings of the next tokens, both once more when they are normalised, and these side by side
    selection        T * k * 4, in models with sparse attention: the k tokens that each token sees, at most a context
    logits           S * V * b                   b bytes of each logit: in float32, a copy that is edited, and room to
                                                 sort it with its token id; with ranks, also what they exchange
                                                 (the 16 bits of a product on AMD are left to the margin)

For a model that reads images, N patches of p numbers in the largest image, an encoder of width W with MLPs of J, and
N / m rows for the first layer and for each of d layers behind it:

    image            N * w, the larger w of
                       the patches, which are normalised in float32       12 p
                       a block: attention, or MLP (3 J if it is gated)    8 W * e, (2 W + 2 J) * e
    its rows         (2 N / m + T) * (1 + d) * H * e                      as they are made, and those of a step

and the whole step on a GPU is

    activations      the parts above are added, because PyTorch's allocator keeps memory of both sizes
    attention        results of the splits of long contexts: S * s * query heads / R * context / 256 * (head_dim + 2)
                     * 4, at most 256 MiB, with room for s = 16 / (query heads / KV heads) tokens of each sequence, or
                     4 with latent attention (kernels/triton/attention.py); with sparse attention each of the T tokens
                     is a sequence of k tokens; with entries, 4 tokens and their splits (engine.entry_memory)
    plain attention  for heads that no kernel serves, or all if there are no kernels, K / R of keys and values and D
                     numbers: 16 K / R * D * c for the keys and values of a sequence with c visible tokens, and for up
                     to 256 queries 12 D * query heads / R, and 2 tensors of query heads / R * c * 4, or 3 with caps or
                     sinks, each of at most 1 GiB with room for one query (kernels/reference.py); for latents of L
                     numbers with their rotated part, 12 L * c, 16 L * query heads / R for each query, and 3 tensors of
                     scores (kernels/reference_mla.py)
    indexer          of h heads with d numbers: T * (2 (h + 1) d * e + 4 h) for queries and keys before and after their
                     rotation, and weights; and scores of contexts above k, with counts of their digits, 4 context +
                     2,060 for each 4,096 of it + 16 for each token, for as many tokens as 256 MiB have room for
                     (kernels/triton/index.py). If no kernel serves h and d, or there are no kernels: 16 T * h * d for
                     queries, 12 d * context for keys, and 4 h * context for the scores of each of 64 tokens
                     (kernels/reference_index.py)
    entries          engine.entry_memory; an indexer's keys are then as many as entries
    graphs           activations for 512 tokens and results of splits in a pool of the graphs' own, and 16 KiB for each
                     of 16 kernels of a layer, and those of engine.entry_memory, in each of 64 graphs; a predicting
                     layer has graphs and a pool like these, and reads 512 H * e
    libraries        64 MiB of work space; with ranks, 256 MiB for NCCL's channels
    margin           an eighth of activations and attention, for gaps between blocks of memory
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Self

from pagewick.config import EngineConfig
from pagewick.engine.entry_memory import entry_bytes, entry_splits, further_kernels, num_selected, streams_width
from pagewick.engine.layer_width import widest_layer
from pagewick.models.config import ModelConfig
from pagewick.models.parts import AttentionConfig, LayerConfig
from pagewick.models.tensor_sizes import DTYPE_BYTES

_MIB: Final = 2**20
# Sums of products in float32, as the reference operations of a CPU keep them, and two tensors of logits.
CPU_BYTES: Final = 4
CPU_LOGIT_BYTES: Final = 8
# float32 logits and an edited copy, and a sort's values and 64-bit ids before and after it.
_LOGIT_BYTES: Final = 4 + 4 + 2 * (4 + 8)
# kernels/triton/attention.py: keys of a split, and the most memory for their results.
SPLIT: Final = 256
PARTS_BYTES: Final = 256 * _MIB
# The rows of queries of a sequence whose keys are split, and its tokens with latent attention (kernels/triton/mla.py).
MAX_SHORT_ROWS: Final = 16
MAX_SHORT_TOKENS: Final = 4
# Heads of an indexer that kernels serve, and their sizes; the most memory for scores; and how many numbers beside the
# scores there are for each part of a row (kernels/triton/index.py, selection.py).
INDEX_HEADS: Final = 64
INDEX_DIMS: Final = (32, 128)
SCORES_BYTES: Final = 256 * _MIB
SCORES_PART: Final = 4096
NUMBERS_OF_PART: Final = 2 * 256 + 3
# Tokens whose scores an indexer has at once without kernels (kernels/reference_index.py).
QUERY_SLICE: Final = 64
# Sizes of heads that kernels/triton/attention.py serves, and of latents and rotated parts that kernels/triton/mla.py
# serves; others have the queries and scores of kernels/reference.py and kernels/reference_mla.py.
SERVED_HEAD_DIMS: Final = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256, 512)
SERVED_LATENTS: Final = ((512, 64), (256, 32))
PLAIN_QUERIES: Final = 256
PLAIN_SCORES: Final = 2**28
# A captured kernel takes a node of the graph with its arguments, in the driver's memory and on the device.
_NODE_BYTES: Final = 16 * 2**10
_KERNELS_PER_LAYER: Final = 16
# CUDA graphs that are kept, and the tokens of the largest step that is captured (engine/graph).
MAX_GRAPHS: Final = 64
GRAPH_TOKENS: Final = 512
_LIBRARY_BYTES: Final = 64 * _MIB
_NCCL_BYTES: Final = 256 * _MIB
_MARGIN: Final = 1 / 8
# The share of a GPU's memory that weights, steps, KV cache and other programs may take together.
GPU_MEMORY_UTILIZATION: Final = 0.9


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step. num_tokens: in all sequences together. num_logits: rows. context: the longest sequence.

    element_bytes: bytes of a number of the activations. image_pixels: those of the largest image. has_adapters: whether
    there is room for LoRA adapters. rounds_activations: --fp8-activations. has_kernels: whether kernels compute
    attention and indexers on the GPU, where they serve these. is_float16: whether activations are in float16.
    """

    num_tokens: int
    num_logits: int
    context: int
    element_bytes: int
    image_pixels: int = 0
    has_adapters: bool = False
    rounds_activations: bool = False
    has_kernels: bool = True
    is_float16: bool = False

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> Self:
        """Return the limits of `model` under a config, which need not be resolved."""
        drafts = 0 if config.speculative_method == "none" else config.most_draft_tokens
        context, pixels = config.max_model_len or model.max_position_embeddings, 0
        if model.vision is not None:
            most = model.vision.fixed_pixels or config.max_image_pixels or model.vision.most_pixels
            pixels = min(most, context * model.vision.pixels_per_token)
        dtype = model.dtype if config.dtype == "auto" else config.dtype
        return cls(
            num_tokens=max(config.max_num_batched_tokens, 0 if model.encoder is None else context),
            num_logits=0 if model.encoder is not None else max_num_logits(config.max_num_seqs, drafts),
            context=context,
            image_pixels=pixels,
            element_bytes=DTYPE_BYTES[dtype],
            has_adapters=config.enable_lora,
            rounds_activations=config.fp8_activations,
            is_float16=dtype == "float16",
        )


def max_num_logits(max_num_seqs: int, num_draft_tokens: int) -> int:
    """Return the largest number of rows of logits in a step with up to this number of draft tokens per sequence."""
    return max_num_seqs * (1 + num_draft_tokens)


def gpu_cache_bytes(free: int, total: int, step_bytes: int, utilization: float | None = None) -> int:
    """Return the bytes for the KV cache on a GPU with these free and total bytes after the weights are loaded.

    utilization: the largest share of all memory that this and other programs may take together; None:
    GPU_MEMORY_UTILIZATION.
    """
    left_alone = total * (1 - (utilization or GPU_MEMORY_UTILIZATION))
    return max(0, int(free - left_alone) - step_bytes)


def gpu_step_bytes(model: ModelConfig, limits: StepLimits, num_ranks: int = 1) -> int:
    """Return the bytes that the largest step needs on one of num_ranks GPUs, as the module says."""
    used = _gpu_activation_bytes(model, limits, limits.num_tokens, num_ranks) + _parts_bytes(model, limits, num_ranks)
    used += image_bytes(model, limits) + plain_attention_bytes(model, limits, num_ranks)
    libraries = _LIBRARY_BYTES + (_NCCL_BYTES if num_ranks > 1 else 0)
    return int(used * (1 + _MARGIN)) + gpu_graph_bytes(model, limits, num_ranks) + libraries


def image_bytes(model: ModelConfig, limits: StepLimits) -> int:
    """Return the bytes for the largest image, as the module says; 0 for a model that reads none."""
    if (vision := model.vision) is None:
        return 0
    num_patches = limits.image_pixels // vision.patch_size**2
    num_rows = 2 * num_patches // vision.merge_size**2 + limits.num_tokens
    inner = (3 if vision.is_gated else 2) * vision.intermediate_size
    projector = vision.projector_numbers // vision.merge_size**2
    block = max(8 * vision.hidden_size, 2 * vision.hidden_size + inner, projector) * limits.element_bytes
    rows = num_rows * (1 + len(vision.deepstack_blocks)) * vision.out_hidden_size * limits.element_bytes
    return num_patches * max(12 * math.prod(vision.patch_shape), block) + rows


def plain_attention_bytes(model: ModelConfig, limits: StepLimits, num_ranks: int = 1) -> int:
    """Return the bytes for attention that no kernel of a GPU serves, as the module says; 0 if there is none."""
    if model.encoder is not None:
        return 0
    return max(_plain_attention_bytes_of(layer, limits, num_ranks) for layer in model.layers)


def _plain_attention_bytes_of(layer: LayerConfig, limits: StepLimits, num_ranks: int) -> int:
    attention = layer.attention
    if not isinstance(attention, AttentionConfig):
        return _plain_latent_bytes(layer, limits, num_ranks)
    if limits.has_kernels and attention.head_dim in SERVED_HEAD_DIMS:
        return 0
    num_heads, num_kv_heads = (-(-n // num_ranks) for n in (attention.num_heads, attention.num_kv_heads))
    num_queries = min(PLAIN_QUERIES, limits.num_tokens)
    num_keys = limits.context if layer.window is None else min(limits.context, layer.window + num_queries)
    num_scores = max(num_heads * num_keys, min(num_queries * num_heads * num_keys, PLAIN_SCORES))
    copies = 3 if attention.logit_soft_cap is not None or attention.has_sinks else 2
    per_token = 12 * num_queries * num_heads + 16 * num_kv_heads * num_keys
    return copies * 4 * num_scores + per_token * attention.head_dim


def _plain_latent_bytes(layer: LayerConfig, limits: StepLimits, num_ranks: int) -> int:
    if (latent := layer.latent) is None:
        return 0
    if limits.has_kernels and (latent.kv_lora_rank, latent.qk_rope_head_dim) in SERVED_LATENTS:
        return 0
    num_heads, num_queries, num_keys = -(-latent.num_heads // num_ranks), limits.num_tokens, limits.context
    if (indexer := layer.indexer) is not None:
        num_queries, num_keys = 1, min(indexer.top_k, num_keys)
    num_queries = min(num_queries, PLAIN_QUERIES, max(1, PLAIN_SCORES // (num_heads * num_keys)))
    numbers = 12 * num_keys + 16 * num_queries * num_heads
    return 3 * 4 * num_queries * num_heads * num_keys + numbers * latent.latent_size


def gpu_graph_bytes(model: ModelConfig, limits: StepLimits, num_ranks: int = 1) -> int:
    """Return the bytes that a model's CUDA graphs keep, which are part of gpu_step_bytes; encoders have no graphs."""
    if model.encoder is not None:
        return 0
    activations = _gpu_activation_bytes(model, limits, min(GRAPH_TOKENS, limits.num_tokens), num_ranks)
    num_kernels = _KERNELS_PER_LAYER * model.num_layers + sum(map(further_kernels, model.layers))
    pool = activations + _parts_bytes(model, limits, num_ranks)
    if model.has_mtp and model.mtp is not None:
        num_kernels += _KERNELS_PER_LAYER + further_kernels(model.mtp.layer(model.layers))
        pool = 2 * pool + GRAPH_TOKENS * model.hidden_size * limits.element_bytes
    return pool + _NODE_BYTES * num_kernels * MAX_GRAPHS


def _gpu_activation_bytes(model: ModelConfig, limits: StepLimits, num_tokens: int, num_ranks: int) -> int:
    size = limits.element_bytes
    # Ranks exchange parts of float32 logits; the parts of all of them are there before they are put together.
    per_logit = _LOGIT_BYTES + (0 if num_ranks == 1 else 2 * 4)
    used = activation_bytes(
        model, num_tokens, limits.num_logits, size, per_logit, num_ranks, limits.context, is_float16=limits.is_float16
    )
    used += max(_indexer_bytes(layer, limits, num_tokens) for layer in model.layers)
    more = limits.has_adapters * size + limits.rounds_activations * (4 + 1)
    return used + num_tokens * widest_layer(model, num_ranks, is_float16=limits.is_float16) * more


def _parts_bytes(model: ModelConfig, limits: StepLimits, num_ranks: int) -> int:
    """Return the bytes for the results of splits of the keys."""
    return max(_parts_bytes_of(layer, limits, num_ranks) for layer in model.layers)


def _parts_bytes_of(layer: LayerConfig, limits: StepLimits, num_ranks: int) -> int:
    num_sequences, context = limits.num_logits, limits.context
    if (indexer := layer.indexer) is not None:
        num_sequences, context = limits.num_tokens, min(indexer.top_k, context)
    num_splits = -(-context // SPLIT) if layer.rows is None else entry_splits(layer, context)
    of_sequence = _split_width(layer) // num_ranks * num_splits * 4
    return max(of_sequence, min(of_sequence * num_sequences, PARTS_BYTES))


def _indexer_bytes(layer: LayerConfig, limits: StepLimits, num_tokens: int) -> int:
    indexer, context, entries = layer.indexer, limits.context, entry_bytes(layer, num_tokens, limits.context)
    if layer.rows is not None and layer.rows.compressor is not None:
        indexer, context = layer.rows.indexer, context // layer.rows.compressor.ratio
    if indexer is None:
        return entries
    num_heads, head_dim = indexer.num_heads, indexer.head_dim
    if not limits.has_kernels or num_heads > INDEX_HEADS or head_dim not in INDEX_DIMS:
        scores = QUERY_SLICE * num_heads * context * 4
        return entries + 16 * num_tokens * num_heads * head_dim + 12 * head_dim * context + scores
    numbers = entries + num_tokens * (2 * (num_heads + 1) * head_dim * limits.element_bytes + 4 * num_heads)
    if context <= indexer.top_k:
        return numbers
    row = 4 * (context + -(-context // SCORES_PART) * NUMBERS_OF_PART + 4)
    return numbers + row * max(1, min(num_tokens, SCORES_BYTES // row))


def activation_bytes(
    model: ModelConfig,
    num_tokens: int,
    num_logits: int,
    element_bytes: int,
    logit_bytes: int,
    num_ranks: int = 1,
    context: int | None = None,
    *,
    is_float16: bool = False,
) -> int:
    """Return the bytes of hidden states, of the widest layer, and of logits that take logit_bytes each.

    context: the longest sequence; None: the longest that the model's file intends. is_float16: whether a GPU computes
    in float16.
    """
    width = 4 * model.hidden_size + widest_layer(model, num_ranks, is_float16=is_float16)
    if model.has_wide_residual:
        width += 2 * model.hidden_size
    if model.block == "shortcut":
        width += model.hidden_size
    if model.layer_inputs is not None:
        width += 3 * model.num_layers * model.layer_inputs.size
    width += streams_width(model)
    if model.altup is not None:
        width += 3 * model.altup.num_streams * model.hidden_size
    if model.has_mtp:
        width += 6 * model.hidden_size
    num_logits = min(num_logits, num_tokens)
    selected = max(num_selected(layer, context or model.max_position_embeddings) for layer in model.layers)
    return num_tokens * (width * element_bytes + 4 * selected) + num_logits * model.vocab_size * logit_bytes


def _split_width(layer: LayerConfig) -> int:
    """Numbers that a split of the keys leaves for a short sequence: of each token and head, sums and 2 statistics."""
    attention = layer.attention
    if isinstance(attention, AttentionConfig):
        num_tokens = max(1, MAX_SHORT_ROWS // (attention.num_heads // attention.num_kv_heads))
        return num_tokens * attention.num_heads * (attention.head_dim + 2)
    if layer.latent is not None:
        return MAX_SHORT_TOKENS * layer.latent.num_heads * (layer.latent.kv_lora_rank + 2)
    return 0 if layer.rows is None else MAX_SHORT_TOKENS * layer.rows.num_heads * (layer.rows.head_dim + 2)
