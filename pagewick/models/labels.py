"""Heads that rate a text by labels, in place of the vocabulary head that writes one.

Checkpoints whose architecture ends in ForSequenceClassification have such a head: `score.weight`
[num_labels, hidden_size], whose product with the hidden state of the last token are the logits of the labels
(transformers' GenericForSequenceClassification). Rerankers of this form have one label. The sigmoid of
its logit is the score, unless the file names another function, as sentence-transformers' CrossEncoder does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pagewick.models.entries import Entries

ENDING: Final = "ForSequenceClassification"
# An entry of our own, of files that name what becomes of the logits in another way.
ACTIVATION_ENTRY: Final = "label_activation"
# transformers does not write the number of labels if it is this one.
_DEFAULT_NUM_LABELS: Final = 2
_MODULES: Final = {"Sigmoid": "sigmoid", "Identity": "none"}
_MODULE_PREFIX: Final = "torch.nn.modules."


@dataclass(frozen=True, slots=True)
class LabelHead:
    """num_labels: rows of score.weight. activation: how a score follows from their logits, as in
    pooling_params.Scoring; empty if the labels are classes of texts, of which none is a score.
    """

    num_labels: int
    activation: str


def read_label_head(entries: Entries) -> LabelHead:
    """Read the head of a config.json. Raises ModelLoadError for an activation that is not supported."""
    num_labels = entries.size("num_labels", _num_named(entries))
    if (activation := entries.get(ACTIVATION_ENTRY)) is not None:
        return LabelHead(num_labels, str(activation))
    activation = _named_activation(entries) or "sigmoid"
    return LabelHead(num_labels, activation if num_labels == 1 else "")


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
