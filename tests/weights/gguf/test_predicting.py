"""Files that Pagewick writes hold the layer that predicts further tokens, as those of llama.cpp's converter do."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from pagewick.cli.imatrix import read
from pagewick.cli.quantizing.observation import Observation
from pagewick.cli.quantizing.plan import planned_export
from pagewick.config import EngineConfig
from pagewick.engine.model_loading import read_model_config
from pagewick.engine.preflight import check_models
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.writing import encoded_values
from pagewick.weights.opening import open_source
from tests.cli.test_imatrix import inputs_of
from tests.models.answers import running
from tests.models.checkpoints import write_checkpoint
from tests.models.predicting import EXAONE, Predicting
from tests.weights.gguf import predicting_models
from tests.weights.gguf.models import FILES
from tests.weights.gguf.test_export import checkpoint_of, contents
from tests.weights.gguf.written import write

OTHERS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {}, "deepseek-v3.2": {}, "glm-5.2": {}, "k-exaone": {
        "layout": EXAONE, "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * 3],
    },
}  # fmt: skip
# The converter also writes copies of the model's embedding and head, which llama.cpp does not need.
COPIES = {"blk.2.nextn.embed_tokens.weight", "blk.2.nextn.shared_head_head.weight"}


def add_tokenizer(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    num_tokens = config.get("text_config", config)["vocab_size"]
    vocabulary = {f"t{token_id}": token_id for token_id in range(num_tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(directory / "tokenizer.json"))


def saved(made: Predicting, directory: Path) -> Path:
    made.write(directory)
    add_tokenizer(directory)
    return directory


def assert_same_tensors(path: Path, model: Path) -> None:
    """Compare the tensors of a file with those of its checkpoint that are used."""
    check_models(EngineConfig(model=str(path), speculative_method="mtp"))
    with open_source(path) as ours, open_source(model) as theirs:
        copies = {name for name in theirs.names() if name not in ours.names()}
        assert all(name.endswith(("shared_head.head.weight", "embed_tokens.weight")) for name in copies)
        for name in ours.names():
            if not name.endswith("A_log"):  # exp() of it, which several numbers share.
                assert torch.equal(ours.get(name), theirs.get(name)), name


@pytest.mark.parametrize("name", predicting_models.MODELS)
def test_files_are_those_of_the_converter_of_llama_cpp(name: str, tmp_path: Path) -> None:
    model = saved(predicting_models.original(name), tmp_path / "model")
    ours, theirs = write(model, tmp_path / "ours.gguf", "f32"), tmp_path / "theirs.gguf"
    theirs.write_bytes(lzma.decompress((FILES / f"mtp/{name}.gguf.xz").read_bytes()))
    written, expected = encoded_values(ours), encoded_values(theirs)
    others = ("tokenizer.", "general.name", "general.size_label", "nemotron_h_moe.context_length")
    compared = {key for key in expected if not key.startswith(others)}
    assert {key for key in compared if written[key] != expected[key]} == set()
    assert any(key.endswith("nextn_predict_layers") for key in compared)
    assert contents(ours) == {key: one for key, one in contents(theirs).items() if key not in COPIES}
    if name == "glm-4.5":
        assert_same_tensors(ours, model)
    # A file that is written from a file keeps the layer, too.
    assert contents(write(theirs, tmp_path / "again.gguf", "f32")) == contents(theirs)


@pytest.mark.parametrize("name", OTHERS)
def test_the_layer_comes_back(name: str, tmp_path: Path) -> None:
    model = saved(Predicting(name, **OTHERS[name]), tmp_path / "model")
    assert_same_tensors(write(model, tmp_path / "m.gguf", "f32"), model)


def test_hy3_with_the_layer_and_without(tmp_path: Path) -> None:
    """Its config.json names a number of such layers, which a file without them does not say."""
    model = saved(Predicting("hy3", norm="final_layernorm"), tmp_path / "model")
    assert_same_tensors(write(model, tmp_path / "m.gguf", "f32"), model)
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.3.")}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    without = open_gguf(write(model, tmp_path / "without.gguf", "f32"))
    assert "hy_v3.nextn_predict_layers" not in without.values and without.values["hy_v3.block_count"] == 3


def test_the_layer_changes_no_type_of_other_tensors(tmp_path: Path) -> None:
    model = saved(predicting_models.original("glm-4.5"), tmp_path / "model")
    with planned_export(model, "m", "q4_k_m") as (export, notes):
        assert notes == []
        with_layer = dict(export.types)
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.2.")}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    with planned_export(model, "m", "q4_k_m") as (export, notes):
        assert export.types == {name: kind for name, kind in with_layer.items() if not name.startswith("blk.2.")}
    assert with_layer["blk.2.nextn.eh_proj.weight"] == "Q5_0"


def test_a_layer_beside_the_part_that_reads_text(tmp_path: Path) -> None:
    """In files of Qwen3.5 with images. Files have 1 + weight of its norms."""
    write_checkpoint("qwen3.5-multimodal", tmp_path)
    add_tokenizer(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    like, size = text["num_hidden_layers"] - 1, text["hidden_size"]
    tensors, prefix = load_file(tmp_path / "model.safetensors"), f"model.language_model.layers.{like}."
    layer = {name.replace(prefix, "mtp.layers.0."): one.clone() for name, one in tensors.items() if prefix in name}
    norms = {f"mtp.{name}.weight": torch.ones(size) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    extra = {**layer, **norms, "mtp.fc.weight": torch.randn(size, 2 * size)}
    assert "mtp.layers.0.self_attn.q_proj.weight" in extra
    save_file({**tensors, **extra}, tmp_path / "model.safetensors", {"format": "pt"})
    path = write(tmp_path, tmp_path / "m.gguf", "f32")
    check_models(EngineConfig(model=str(path), speculative_method="mtp"))
    with open_source(path) as source:
        for name, tensor in extra.items():
            torch.testing.assert_close(source.get(name), tensor, rtol=0, atol=1e-6)


def test_a_layer_that_is_not_used_is_named(tmp_path: Path) -> None:
    checkpoint_of("mimo-v2-flash", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with planned_export(tmp_path, "m", "f32") as (_, notes):
        assert "the file lacks model.mtp.layers.0.mlp.up_proj.weight and its like, which Pagewick does not use" in notes


def test_importance_of_the_layer(tmp_path: Path) -> None:
    """The sums of its inputs are those of transformers."""
    made = predicting_models.original("glm-4.5")
    made.write(tmp_path)
    chunk = torch.randint(2, 97, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with running(tmp_path, num_threads=1, speculative_method="mtp") as engine:
        observation = Observation(engine.model, read_model_config(tmp_path))
        read(engine, 0, chunk)
        observation.close()
    hidden_states = made.hidden_states(chunk)
    next_id = int(made.whole.lm_head(hidden_states[-1]).argmax())
    with inputs_of(made) as inputs:
        made.all_logits(hidden_states, [*chunk[1:], next_id])
    names = {f"layer.layers.0.self_attn.{part}_proj.weight": f"blk.2.attn_{part}.weight" for part in "qkv"}
    names |= {"fc.weight": "blk.2.nextn.eh_proj.weight"}
    for theirs, stored in names.items():
        sums, counts = observation.sums[stored]
        assert counts.tolist() == [70]
        torch.testing.assert_close(sums[0].float(), torch.cat(inputs[theirs]).square().sum(0), rtol=1e-3, atol=1e-5)
    assert "blk.2.ffn_down_exps.weight" in observation.sums
