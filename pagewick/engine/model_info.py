"""ModelInfo: what the engine tells its clients about the loaded model. Imports no torch."""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, kw_only=True):
    """The loaded model and the engine's final settings.

    weights: the formats in which the matrices of weights are kept; the dtype's name if they are not quantized.
    timeline: the phases of the start, each with its seconds. rotations: the model's rotary embeddings in words; flags
    can change them. num_parameters, kv_cache_bytes: of all ranks together. embedding, embedding_size: see
    ModelConfig. num_labels, label_activation, label_names, problem_type: see LabelHead; 0: the model has no such head.
    num_token_types: see EncoderConfig. image_token_id: the token for each square of image_side x image_side pixels;
    None: the model reads no images. image_step: the sides of images are multiples of it; None: of image_side. Pixels
    that fill no square have no token. image_tile: side in pixels of the tiles in which pictures with edges are read;
    None: there are no such pictures. image_most_tiles: the rows and columns of those with more tokens than this number
    of tiles are shrunk. has_row_breaks: another one follows each row. max_image_tokens: see Scheduler.
    image_num_leading, image_fixed_tokens: see VisionConfig; an image stands behind the first of these numbers of
    tokens, and has the second. image_sizes: the heights and widths that pictures may have; empty: all that image_step
    divides. writes_captions: whether each prompt has one image, and a text
    behind it.
    adapters: where the loaded LoRA adapters come from, by name. max_adapters: the number for which there is room.
    default_adapter: where that of requests without one comes from, if there is one.
    """

    model_path: str
    architecture: str
    dtype: str
    device: str
    kernels: str
    vocab_size: int
    embedding_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    kv_cache_bytes: int
    num_parameters: int
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    weights: str = ""
    embedding: str = ""
    num_labels: int = 0
    label_activation: str = ""
    label_names: list[str] = []
    problem_type: str = ""
    num_token_types: int = 0
    image_token_id: int | None = None
    image_side: int = 1
    image_step: int | None = None
    image_tile: int | None = None
    image_most_tiles: int | None = None
    has_row_breaks: bool = False
    max_image_tokens: int = 0
    image_num_leading: int = 0
    image_fixed_tokens: int = 0
    writes_captions: bool = False
    image_sizes: list[tuple[int, int]] = []
    adapters: dict[str, str] = {}
    max_adapters: int = 0
    default_adapter: str = ""
    rotations: list[str] = []
    eos_token_ids: list[int] = []
    timeline: list[tuple[str, float]] = []

    @property
    def num_ranks(self) -> int:
        """Number of processes that have a part of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def types(self) -> str:
        """Return the formats of weights and the data type of activations in words, shorter if both are the same."""
        return self.dtype if self.weights in ("", self.dtype) else f"weights in {self.weights}, {self.dtype}"
