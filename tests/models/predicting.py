"""Tiny checkpoints with a layer that predicts further tokens, and what it predicts by transformers' own layers.

The layer is the last one of a model of transformers that is one layer deeper. The formula is DeepSeek-V3's
(arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.checkpoints import make_model, save
from tests.models.variants import VARIANTS

_PARTS: Final = ("fc", "embedding_norm", "hidden_norm", "norm")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How files of a family hold the layer. {idx}: the number of the model's own layers.

    names: of what is around the layer: of fc, of the norms of embeddings and of hidden states, and of the last norm.
    prefixes: of its tensors; several if it is several layers of transformers'. kinds: entries with one kind for each
    layer, and those of this layer. has_copies: files repeat the embedding and the head. stack: transformers' name of
    the model in files. count: the entry with the number of layers. inner: names of what the layer consists of, in
    transformers' layer and in files; what it lacks here is no part of it.
    """

    names: Sequence[str]
    prefixes: Sequence[str]
    kinds: Mapping[str, Sequence[str]]
    has_copies: bool = False
    stack: str = "model"
    count: str = "num_hidden_layers"
    inner: Mapping[str, str] = field(default_factory=dict)


_KINDS: Final = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"], "indexer_types": ["full"]}
QWEN: Final = {
    "fc": "mtp.fc", "embedding_norm": "mtp.pre_fc_norm_embedding", "hidden_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
}  # fmt: skip


def nextn(norm: str = "shared_head.norm") -> Layout:
    """Return DeepSeek's layout. norm: the name of the last norm."""
    names = tuple(f"model.layers.{{idx}}.{name}" for name in ("eh_proj", "enorm", "hnorm", norm))
    return Layout(names=names, prefixes=("model.layers.{idx}.",), kinds=_KINDS, has_copies=True)


OF_QWEN: Final = Layout(names=tuple(QWEN.values()), prefixes=("mtp.layers.0.",), kinds=_KINDS)


NEMOTRON: Final = Layout(
    names=("mtp.layers.0.eh_proj", "mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm"),
    prefixes=("mtp.layers.0.", "mtp.layers.1."),
    kinds={"layers_block_type": ["full_attention", "moe"], "layer_types": ["full_attention", "moe"]},
    stack="backbone",
)


EXAONE: Final = Layout(
    names=tuple(QWEN.values()), prefixes=("mtp.layers.0.",),
    kinds={"layer_types": ["full_attention"], "mlp_layer_types": ["dense"]},
)  # fmt: skip
MELLUM: Final = Layout(
    names=tuple(QWEN.values()), prefixes=("mtp.layers.0.",),
    kinds={"layer_types": ["sliding_attention"], "mlp_layer_types": ["sparse"]},
)  # fmt: skip
# The first half of a layer, without experts.
LONGCAT: Final = Layout(
    names=("model.mtp.layers.0.eh_proj", "model.mtp.layers.0.enorm.m", "model.mtp.layers.0.hnorm.m", "model.mtp.norm"),
    prefixes=("model.mtp.layers.0.",),
    kinds={},
    count="num_layers",
    inner={
        "self_attn.0.": "self_attn.", "mlps.0.": "transformer_layer.mlp.", "input_layernorm.0.": "input_layernorm.",
        "post_attention_layernorm.0.": "post_attention_layernorm.",
    },
)  # fmt: skip


class Predicting(nn.Module):
    """A model of transformers and its predicting layer, in float32.

    is_like_qwen: the files' names are Qwen's. norm: their name of the layer's last norm, if it is another than in
    DeepSeek's. layout: another than these. entries: of the model alone.
    """

    def __init__(
        self, name: str, *, is_like_qwen: bool = False, norm: str = "shared_head.norm", layout: Layout | None = None,
        **entries: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        layout = layout or (OF_QWEN if is_like_qwen else nextn(norm))
        self.is_like_qwen = is_like_qwen
        given = {**VARIANTS[name].all_entries(), **entries}
        self._layout, self._num_added = layout, len(layout.prefixes)
        if layout.count in given:
            given[layout.count] += self._num_added
        for entry, kinds in layout.kinds.items():
            if given.get(entry) is not None:
                given[entry] = [*given[entry], *kinds]
        self._divide(make_model(name, given))
        size = self.base.config.hidden_size
        torch.manual_seed(5)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.fc.weight.data.normal_(0, (2 * size) ** -0.5)
        last = self.base.norm_f if hasattr(self.base, "norm_f") else self.base.norm
        self.embedding_norm, self.hidden_norm, self.norm = (deepcopy(last) for _ in range(3))
        for norm in (self.embedding_norm, self.hidden_norm, self.norm):
            norm.weight.data += torch.empty(size).uniform_(-0.4, 0.4)

    def _divide(self, whole: nn.Module) -> None:
        self.whole: Any = whole
        self.base, self.layer = deepcopy(self.whole.model), deepcopy(self.whole.model)
        self.num_layers = len(self.base.layers) - self._num_added
        for part, layers in ((self.base, slice(self.num_layers)), (self.layer, slice(self.num_layers, None))):
            part.config = deepcopy(part.config)
            for entry in self._layout.kinds:
                if getattr(part.config, entry, None) is not None:
                    setattr(part.config, entry, getattr(part.config, entry)[layers])
            part.layers = part.layers[layers]
            setattr(part.config, self._layout.count, len(part.layers))
        if self._layout.inner:
            self.layer.layers[0].mlp = _Nothing()
            for second in (self.layer.layers[0].self_attn[1].o_proj, self.layer.layers[0].mlps[1].down_proj):
                second.weight.data.zero_()
        setattr(self.layer, "norm_f" if hasattr(self.layer, "norm_f") else "norm", nn.Identity())

    @property
    def _prefixes(self) -> list[tuple[str, str]]:
        """The prefixes of the layer's tensors in transformers and in files."""
        idx = self.num_layers
        theirs = (f"{self._layout.stack}.layers.{idx + number}." for number in range(self._num_added))
        whole = zip(theirs, (prefix.format(idx=idx) for prefix in self._layout.prefixes), strict=True)
        inner = self._layout.inner or {"": ""}
        return [(start + own, other + file) for start, other in whole for own, file in inner.items()]

    @property
    def names(self) -> dict[str, str]:
        """The tensors around the layer, by the names of this class's modules."""
        return {
            ours: f"{theirs.format(idx=self.num_layers)}.weight"
            for ours, theirs in zip(_PARTS, self._layout.names, strict=True)
        }

    def write(self, directory: Path) -> None:
        """Write a checkpoint, with the names that published files have."""
        save(self.whole, directory)
        tensors = _renamed(load_file(directory / "model.safetensors"), self._prefixes)
        if self._layout.inner:
            tensors = {name: one for name, one in tensors.items() if f".layers.{self.num_layers}." not in name}
        tensors |= {theirs: getattr(self, ours).weight.data.clone() for ours, theirs in self.names.items()}
        idx = self.num_layers
        if self._layout.has_copies:
            tensors[f"model.layers.{idx}.embed_tokens.weight"] = self._embedding.weight.data.clone()
            tensors[f"model.layers.{idx}.shared_head.head.weight"] = self.whole.lm_head.weight.data.clone()
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        path = directory / "config.json"
        config: dict[str, Any] = json.loads(path.read_text())
        config |= {self._layout.count: idx, "num_nextn_predict_layers": 1}
        for entry in self._layout.kinds:
            if config.get(entry) is not None:
                config[entry] = config[entry][:idx]
        path.write_text(json.dumps(config))

    def read(self, tensors: Mapping[str, Tensor], directory: Path) -> None:
        """Take the numbers of a checkpoint's tensors, with the names of `write`. directory: an empty one."""
        for ours, theirs in self.names.items():
            getattr(self, ours).weight.data.copy_(tensors[theirs])
        self.whole.config.save_pretrained(directory)
        theirs = [(file, own) for own, file in self._prefixes]
        save_file(_renamed(tensors, theirs), directory / "model.safetensors", {"format": "pt"})
        options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
        self._divide(type(self.whole).from_pretrained(directory, **options).eval())

    @property
    def has_states(self) -> bool:
        """Whether some of the model's layers keep a state."""
        return "linear_attention" in (getattr(self.base.config, "layer_types", None) or ())

    @property
    def _embedding(self) -> nn.Module:
        found: nn.Module = self.base.get_input_embeddings()
        return found

    @torch.no_grad()
    def logits(self, token_ids: list[int], draft_token_ids: list[int]) -> Tensor:
        """Return the layer's logits [vocab_size] of the token after these.

        token_ids: those that the model has accepted, the newest of which it has not computed. draft_token_ids: those
        that the layer has predicted behind them.
        """
        known = torch.tensor([token_ids])
        carried = self.base(input_ids=known[:, :-1], use_cache=False).last_hidden_state
        following = [*token_ids[1:], *draft_token_ids]
        while True:
            length = carried.shape[1]
            predicted = self._predicted(following[:length], carried)
            if length == len(following):
                found: Tensor = self.whole.lm_head(predicted)[0, -1]
                return found
            carried = torch.cat([carried, predicted[:, -1:]], dim=1)

    @torch.no_grad()
    def hidden_states(self, token_ids: list[int]) -> Tensor:
        """Return what the layer reads of the model: [T, hidden_size]."""
        found: Tensor = self.base(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
        return found

    @torch.no_grad()
    def all_logits(self, hidden_states: Tensor, following: list[int]) -> Tensor:
        """Return the layer's logits [T, vocab_size]. following: the tokens after those with these hidden states."""
        found: Tensor = self.whole.lm_head(self._predicted(following, hidden_states.unsqueeze(0)))[0]
        return found

    def _predicted(self, following: list[int], hidden: Tensor) -> Tensor:
        """following: the tokens after those with these hidden states."""
        embedded = self._embedding(torch.tensor([following]))
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1)
        found: Tensor = self.norm(self.layer(inputs_embeds=self.fc(both), use_cache=False).last_hidden_state)
        return found


class _Nothing(nn.Module):
    """Experts that add nothing."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def _renamed(tensors: Mapping[str, Tensor], prefixes: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        start, other = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        found[other + name.removeprefix(start)] = tensor
    return found
