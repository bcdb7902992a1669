"""Heads that rate a text by labels, in place of the vocabulary head that writes one.

Checkpoints whose architecture ends in ForSequenceClassification have such a head: `score.weight`
[num_labels, hidden_size], whose product with the hidden state of the last token are the logits of the labels
(transformers' GenericForSequenceClassification). Rerankers of this form have one label. The sigmoid of
its logit is the score, unless the file names another function, as sentence-transformers' CrossEncoder does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pagewick.models.entries import Entries

ENDING: Final = "ForSequenceClassification"
# An entry of our own, of files that name what becomes of the logits in another way.
ACTIVATION_ENTRY: Final = "label_activation"
_ACTIVATIONS: Final = ("", "none", "sigmoid", "softmax")
# transformers does not write the number of labels if it is this one.
_DEFAULT_NUM_LABELS: Final = 2
# transformers refuses all others.
_PROBLEM_TYPES: Final = ("regression", "single_label_classification", "multi_label_classification")
_MODULES: Final = {"Sigmoid": "sigmoid", "Identity": "none"}
_MODULE_PREFIX: Final = "torch.nn.modules."


@dataclass(frozen=True, slots=True)
class LabelDense:
    """A layer before that of the labels: norm(activation(weight x + bias)), without the norm unless has_norm.

    activation: a name in layers.label_head.ACTIVATIONS.
    """

    activation: str
    has_bias: bool = True
    has_norm: bool = False


@dataclass(frozen=True, slots=True)
class LabelHead:
    """num_labels: rows of score.weight. activation: how a score follows from their logits, as in
    pooling_params.Scoring; empty if the labels are classes of texts, of which none is a score.

    pooling: the hidden state that the head gets, as in pooling_params.PoolingParams. dense: the layer before that of
    the labels; None: there is none. names: those of the labels, if the file names them. problem_type: transformers'
    word for what the labels are to a text, which decides how probabilities follow from logits; empty if the file has
    none.
    """

    num_labels: int
    activation: str
    pooling: str = "last"
    dense: LabelDense | None = None
    has_bias: bool = False
    names: tuple[str, ...] = ()
    problem_type: str = ""


def read_label_head(entries: Entries, **fields: Any) -> LabelHead:
    """Read the head of a config.json; `fields` are those of LabelHead that follow from the family.

    Raises ModelLoadError for an activation or a problem type that is not supported.
    """
    num_labels = entries.size("num_labels", _num_named(entries))
    if ACTIVATION_ENTRY in entries:
        return LabelHead(num_labels, entries.choice(ACTIVATION_ENTRY, _ACTIVATIONS), **fields)
    activation = _named_activation(entries) or "sigmoid"
    return LabelHead(
        num_labels,
        activation if num_labels == 1 else "",
        names=_names(entries, num_labels),
        problem_type="" if entries.get("problem_type") is None else entries.choice("problem_type", _PROBLEM_TYPES),
        **fields,
    )


def _names(entries: Entries, num_labels: int) -> tuple[str, ...]:
    """Return the labels' names; empty if the file does not name them all, or has only transformers' usual names."""
    named = entries.get("id2label")
    found = {str(key): value for key, value in named.items()} if isinstance(named, dict) else {}
    names = [found.get(str(idx)) for idx in range(num_labels)]
    if not all(isinstance(name, str) for name in names) or names == [f"LABEL_{idx}" for idx in range(num_labels)]:
        return ()
    return tuple(map(str, names))


def _num_named(entries: Entries) -> int:
    names = entries.get("id2label")
    return len(names) if isinstance(names, dict) and names else _DEFAULT_NUM_LABELS


def _named_activation(entries: Entries) -> str:
    """Return the function that the file names; empty if it names none."""
    trained = entries.get("sentence_transformers")
    found = trained.get("activation_fn") if isinstance(trained, dict) else None
    name = found or entries.get("sbert_ce_default_activation_function")
    if name is None:
        return ""
    known = _MODULES.get(str(name).rpartition(".")[2]) if str(name).startswith(_MODULE_PREFIX) else None
    if known is None:
        entry = "sentence_transformers" if found else "sbert_ce_default_activation_function"
        raise entries.wrong(entry, "one with the activation torch.nn.modules.activation.Sigmoid or ...linear.Identity")
    return known
