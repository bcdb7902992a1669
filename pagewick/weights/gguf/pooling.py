"""How a GGUF file says which tokens see each other, and what becomes of the hidden states. Imports no torch."""

from __future__ import annotations

from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf.architecture import GgufArchitecture
from pagewick.weights.gguf.metadata import Metadata

# pooling_type of embedding models -> PoolingParams.pooling.
_POOLINGS: Final = {1: "mean", 2: "cls", 3: "last"}
# The first token of a text has seen no other one where tokens see earlier ones only.
_CAUSAL_POOLINGS: Final = (1, 3)
# pooling_type of rerankers. llama.cpp's score is the probability of the first label, for these decoders, which its
# converter writes for Qwen3-Reranker; of others it reads the first token of a prompt, which has not seen the rest.
_RANK: Final = 4
_RERANKERS: Final = {"qwen3": "Qwen3ForSequenceClassification"}
_LABELS, _BEFORE_LABELS = "cls.output.weight", "cls.weight"
_LABEL_ENDING: Final = "ForSequenceClassification"


def check_pooling(metadata: Metadata, architecture: GgufArchitecture) -> None:
    """Raise ModelLoadError for a pooling that is not supported, and for a reranker without its head of labels."""
    pooling = _type_of(metadata)
    is_reranker = pooling == _RANK and metadata.kind in _RERANKERS
    if is_reranker or _is_labelled_encoder(metadata, architecture):
        _check_labels(metadata, architecture)
        return
    is_causal = sees_earlier_only(metadata, architecture)
    if pooling not in (0, *(_CAUSAL_POOLINGS if is_causal else _POOLINGS)):
        first = "" if is_causal else "the first token, of "
        raise ModelLoadError(
            f"{metadata.where} holds an embedding model or a reranker whose {metadata.kind}.pooling_type is {pooling}\n"
            f"  Pagewick makes embeddings of {first}the last token or of the mean; give another model"
        )


def sees_earlier_only(metadata: Metadata, architecture: GgufArchitecture) -> bool:
    """Whether a token sees those before it, and none behind. Raises ModelLoadError if the file contradicts itself."""
    key = f"{metadata.kind}.attention.causal"
    is_causal = metadata.values.get(key, not architecture.is_encoder)
    if not isinstance(is_causal, bool):
        raise metadata.wrong(key, f"{is_causal!r:.80}, and must be true or false")
    if is_causal and architecture.is_encoder:
        raise metadata.wrong(key, "not false, and tokens of an encoder see later ones")
    return is_causal


def _check_labels(metadata: Metadata, architecture: GgufArchitecture) -> None:
    labels, dense = (metadata.shapes.get(name, ()) for name in (_LABELS, _BEFORE_LABELS))
    if architecture.is_encoder:
        size = metadata.get("embedding_length")
        if len(labels) != 2 or dense != (size, size):
            raise ModelLoadError(
                f"{metadata.where} holds a model that rates texts, and lacks {_LABELS}, or {_BEFORE_LABELS} of the "
                "layer before it\n"
                "  llama.cpp's converter leaves out the pooler of BERT, without which scores are those of no model; "
                "use the model's safetensors"
            )
    elif len(labels) != 2 or labels[0] < 2:
        raise ModelLoadError(
            f"{metadata.where} holds a reranker, by its {metadata.kind}.pooling_type, without {_LABELS}\n"
            "  use a file of the model that llama.cpp's converter has written as a reranker"
        )


def pooling_entries(metadata: Metadata, architecture: GgufArchitecture) -> dict[str, Any]:
    """Return the entries of config.json that say what becomes of the hidden states, of a file that check_pooling knows.

    Files of encoders that rate texts may have no pooling_type: users of llama.cpp give it.
    """
    pooling = _type_of(metadata)
    if _is_labelled_encoder(metadata, architecture):
        return _label_entries(metadata, architecture)
    if pooling == _RANK:
        names = {"architectures": [_RERANKERS[metadata.kind]], "label_activation": "softmax"}
        return {**names, "num_labels": metadata.shapes[_LABELS][0]}
    return {"embedding_pooling": _POOLINGS[pooling]} if pooling else {}


def _label_entries(metadata: Metadata, architecture: GgufArchitecture) -> dict[str, Any]:
    num_labels = metadata.shapes[_LABELS][0]
    entries: dict[str, Any] = {
        "architectures": [f"{architecture.name.removesuffix('Model')}{_LABEL_ENDING}"],
        "num_labels": num_labels,
    }
    names = metadata.values.get(f"{metadata.kind}.classifier.output_labels")
    if isinstance(names, list) and len(names) == num_labels:
        entries["id2label"] = {str(index): name for index, name in enumerate(names)}
    if metadata.kind == "modern-bert":
        # Older files do not say, and llama.cpp takes the mean for them.
        pooling = metadata.get("classifier.pooling_type", 1)
        entries["classifier_pooling"] = _POOLINGS.get(pooling, pooling) if isinstance(pooling, int) else pooling
        entries["classifier_bias"] = "cls.bias" in metadata.shapes
    return entries


def _is_labelled_encoder(metadata: Metadata, architecture: GgufArchitecture) -> bool:
    has_tensors = _LABELS in metadata.shapes or _BEFORE_LABELS in metadata.shapes
    can_have = architecture.is_encoder and "cls.output" in architecture.whole
    return can_have and (has_tensors or _type_of(metadata) == _RANK)


def _type_of(metadata: Metadata) -> Any:
    return metadata.values.get(f"{metadata.kind}.pooling_type", 0)
