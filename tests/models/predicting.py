"""Tiny checkpoints with a layer that predicts further tokens, and what it predicts by transformers' own layers.

The layer is the last one of a model of transformers that is one layer deeper. The formula is DeepSeek-V3's
(arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.checkpoints import make_model, save
from tests.models.variants import VARIANTS

_DEEPSEEK: Final = {
    "fc": "model.layers.{idx}.eh_proj", "embedding_norm": "model.layers.{idx}.enorm",
    "hidden_norm": "model.layers.{idx}.hnorm", "norm": "model.layers.{idx}.shared_head.norm",
}  # fmt: skip
QWEN: Final = {
    "fc": "mtp.fc", "embedding_norm": "mtp.pre_fc_norm_embedding", "hidden_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
}  # fmt: skip
# Entries with one kind for each layer, and that of the predicting layer.
_LAST_KIND: Final = {"layer_types": "full_attention", "mlp_layer_types": "sparse", "indexer_types": "full"}


class Predicting(nn.Module):
    """A model of transformers and its predicting layer, in float32.

    is_like_qwen: the files' names are Qwen's. norm: their name of the layer's last norm, if it is another.
    """

    def __init__(self, name: str, *, is_like_qwen: bool = False, norm: str = "", **entries: Any) -> None:
        super().__init__()
        given = {**VARIANTS[name].all_entries(), **entries}
        given["num_hidden_layers"] += 1
        for kinds, last in _LAST_KIND.items():
            if given.get(kinds) is not None:
                given[kinds] = [*given[kinds], last]
        self.is_like_qwen = is_like_qwen
        names = QWEN if is_like_qwen else _DEEPSEEK
        self._names = {**names, "norm": f"model.layers.{{idx}}.{norm}"} if norm else names
        self.whole = make_model(name, given)
        self.base = deepcopy(self.whole.model)
        self.base.layers = self.base.layers[:-1]
        self.layer = deepcopy(self.whole.model)
        self.layer.layers = self.layer.layers[-1:]
        self.layer.norm = nn.Identity()
        self.base.config, self.layer.config = deepcopy(self.base.config), deepcopy(self.base.config)
        self.num_layers = self.base.config.num_hidden_layers = len(self.base.layers)
        self.layer.config.num_hidden_layers = 1
        if hasattr(self.layer.config, "layer_types"):
            self.layer.config.layer_types = ["full_attention"]
        size = self.base.config.hidden_size
        torch.manual_seed(5)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.fc.weight.data.normal_(0, (2 * size) ** -0.5)
        self.embedding_norm, self.hidden_norm, self.norm = (deepcopy(self.base.norm) for _ in range(3))
        for norm in (self.embedding_norm, self.hidden_norm, self.norm):
            norm.weight.data += torch.empty(size).uniform_(-0.4, 0.4)

    def write(self, directory: Path) -> None:
        """Write a checkpoint, with the names that published files have."""
        save(self.whole, directory)
        tensors = load_file(directory / "model.safetensors")
        idx = self.num_layers
        if self.is_like_qwen:
            tensors = {_renamed(name, f"model.layers.{idx}.", "mtp.layers.0."): one for name, one in tensors.items()}
        for ours, theirs in self._names.items():
            tensors[f"{theirs.format(idx=idx)}.weight"] = getattr(self, ours).weight.data.clone()
        if not self.is_like_qwen:
            # Published files repeat these.
            tensors[f"model.layers.{idx}.embed_tokens.weight"] = self.base.embed_tokens.weight.data.clone()
            tensors[f"model.layers.{idx}.shared_head.head.weight"] = self.whole.lm_head.weight.data.clone()
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        path = directory / "config.json"
        config: dict[str, Any] = json.loads(path.read_text())
        config |= {"num_hidden_layers": idx, "num_nextn_predict_layers": 1}
        for kinds in _LAST_KIND:
            if config.get(kinds) is not None:
                config[kinds] = config[kinds][:-1]
        path.write_text(json.dumps(config))

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
            embedded = self.base.embed_tokens(torch.tensor([following[:length]]))
            both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(carried)], dim=-1)
            predicted = self.norm(self.layer(inputs_embeds=self.fc(both), use_cache=False).last_hidden_state)
            if length == len(following):
                found: Tensor = self.whole.lm_head(predicted)[0, -1]
                return found
            carried = torch.cat([carried, predicted[:, -1:]], dim=1)


def _renamed(name: str, start: str, other: str) -> str:
    return other + name.removeprefix(start) if name.startswith(start) else name
