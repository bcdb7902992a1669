"""BLIP (arXiv:2201.12086), of the kind that writes captions: BERT as a decoder, whose layers attend to an image, too.

An image is the first tokens of a sequence, one for each row of its encoder, and the text follows; its positions count
from 0 (decision 70).
"""

from __future__ import annotations

from typing import Any, Final

from pagewick.models import reading
from pagewick.models.caption_parts import ImageAttentionConfig
from pagewick.models.config import ModelConfig, architecture_of
from pagewick.models.encoding import ENCODER_DTYPE
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, NormConfig
from pagewick.models.vision.blip_entries import BLIP_NAMES, read_blip_vision

_TEXT: Final = {
    "vocab_size": 30524, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 8,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "layer_norm_eps": 1e-12,
    "bos_token_id": 30522, "pad_token_id": 0, "sep_token_id": 102,
}  # fmt: skip
_HEAD: Final = "text_decoder.cls.predictions"
_NAMES: Final = (
    ("head_transform.dense", f"{_HEAD}.transform.dense"), ("head_transform.norm", f"{_HEAD}.transform.LayerNorm"),
    ("model.embed_tokens.bias", f"{_HEAD}.bias"), ("model", "text_decoder.bert"),
    ("embed_tokens", "embeddings.word_embeddings"), ("embed_positions", "embeddings.position_embeddings"),
    ("embed_norm", "embeddings.LayerNorm"), ("layers", "encoder.layer"),
    ("self_attn.q_proj", "attention.self.query"), ("self_attn.k_proj", "attention.self.key"),
    ("self_attn.v_proj", "attention.self.value"), ("self_attn.o_proj", "attention.output.dense"),
    ("image_attn.q_proj", "crossattention.self.query"), ("image_attn.k_proj", "crossattention.self.key"),
    ("image_attn.v_proj", "crossattention.self.value"), ("image_attn.o_proj", "crossattention.output.dense"),
    ("post_attention_layernorm", "attention.output.LayerNorm"),
    ("post_image_layernorm", "crossattention.output.LayerNorm"), ("mlp.up_proj", "intermediate.dense"),
    ("mlp.down_proj", "output.dense"), ("post_feedforward_layernorm", "output.LayerNorm"),
)  # fmt: skip
# The head, which files may hold although it is tied.
_COPIES: Final = (
    (f"{_HEAD}.decoder.weight", "text_decoder.bert.embeddings.word_embeddings.weight"),
    (f"{_HEAD}.decoder.bias", f"{_HEAD}.bias"),
)
# It, numbers of positions, and a pooler that nothing reads.
_IGNORED: Final = (
    r"text_decoder\.cls\.predictions\.decoder\.(weight|bias)",
    r"text_decoder\.bert\.embeddings\.position_ids",
    r"text_decoder\.bert\.pooler\..*",
)
_TIED: Final = "the head is the table of embeddings"


def read_blip(entries: Entries) -> ModelConfig:
    entries.demand("tie_word_embeddings", True, True, _TIED)
    given = entries.child("text_config") or Entries({}, "text_config")
    outer: dict[str, Any] = {"architectures": [architecture_of(entries.values)]}
    outer |= {name: entries.values[name] for name in ("dtype", "torch_dtype") if name in entries}
    text = given.without_null({**_TEXT, **outer}).filled({**_TEXT, **outer})
    text.demand("is_decoder", True, True, "captions are written by a decoder")
    text.demand("tie_word_embeddings", True, True, _TIED)
    tokens = {name: text.count(f"{name}_token_id") for name in ("bos", "pad", "sep")}
    size = text.size("vocab_size")
    for name, token in tokens.items():
        if token >= size:
            raise text.wrong(f"{name}_token_id", f"below vocab_size ({size})")
    if len(set(tokens.values())) < len(tokens):
        raise text.wrong("pad_token_id", "another token than bos_token_id and sep_token_id, which differ, too")
    # An image's tokens have the id that no text has.
    vision = read_blip_vision(entries.child("vision_config") or Entries({}, "vision_config"), tokens["pad"])
    image = ImageAttentionConfig(num_tokens=vision.fixed_tokens, num_rows=vision.num_rows, row_size=vision.hidden_size)
    num_positions = text.size("max_position_embeddings")
    # A text has at most as many tokens as an image has rows (layers/image_attention.py).
    longest = image.num_tokens + min(num_positions, image.num_rows)
    attention = reading.read_attention(text, qkv_bias=True, o_bias=True, num_kv_heads=text.size("num_attention_heads"))
    activation = reading.read_activation(text, "gelu")
    mlp = reading.read_mlp(text, activation=activation, is_gated=False, bias=True)
    layer = LayerConfig(attention=attention, mlp=mlp, rope=None, image=image)
    return reading.model_config(
        text,
        dtype=reading.read_dtype(text, ENCODER_DTYPE),
        max_position_embeddings=longest,
        longest_context=longest,
        num_position_embeddings=num_positions,
        has_embedding_norm=True,
        block="captioning",
        norm=NormConfig(kind="layer", eps=text.positive("layer_norm_eps"), has_bias=True),
        layers=(layer,) * reading.read_num_layers(text),
        tie_word_embeddings=True,
        head_transform=activation,
        end_token_ids=(tokens["sep"],),
        copies=_COPIES,
        names=(NameMap(parts=(*_NAMES, *BLIP_NAMES)),),
        ignored=_IGNORED,
        vision=vision,
    )
