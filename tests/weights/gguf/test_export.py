"""Checkpoints as GGUF files: they are those of llama.cpp's converter, and give the checkpoints back."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from pagewick.cli.quantizing.metadata import check_same
from pagewick.cli.quantizing.plan import mixed_model, planned_export
from pagewick.demo import MODEL_DIR
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.kernels import quantize_weight
from pagewick.models.registry import read_config
from pagewick.quantization.mixes import MIXES
from pagewick.quantization.plan import plan_quantization
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.export import TYPES, type_named, types_of
from pagewick.weights.gguf.header import FORMATS_BY_NAME, GgufTensor
from pagewick.weights.gguf.pieces import JoinedPiece, Piece
from pagewick.weights.gguf.writing import encoded_values
from pagewick.weights.opening import open_source
from tests.deep import IS_DEEP
from tests.models.answers import answers, make_prompts, running
from tests.models.checkpoints import VARIANTS, save, write_checkpoint
from tests.weights.gguf.models import MODELS, SEPARATED, TILED, VOCAB_SIZE, WRITTEN, original, write_file
from tests.weights.gguf.written import write

FLOATS: Final = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# The converter writes the hidden size as the context length of GLM-4 9B, a million as that of models that rotate
# nothing, and theta although they have none, a size of ERNIE's shared experts that is right in published models only,
# Mamba's sizes into files of Granite 4 without Mamba, a size of heads that no layer of Kimi Linear has, and names
# models by random directories.
_DIFFERENT: Final = re.compile(
    r"tokenizer\..*|general\.name|(chatglm|nemotron_h|nemotron_h_moe)\.context_length"
    r"|kimi-linear\.attention\.value_length"
    r"|granitehybrid\.(context_length|rope\.freq_base)|ernie4_5-moe\.expert_shared_feed_forward_length"
)
_MORE_OF_GRANITE4: Final = re.compile(
    r"granite\.(ssm\..*|expert_(count|shared_feed_forward_length)|attention\.head_count_kv|rope\.scaling\.finetuned)"
)
# Keys that the converter leaves out where they have a reader's default, and that of queries of Mistral 4.
_MORE: Final = re.compile(
    r"tokenizer\..*|[\w-]+\.(vocab_size|attention\.(key|value)_length|expert_gating_func"
    r"|rope\.(freq_base|dimension_count|scaling\.yarn_beta_(fast|slow)))|mistral4\.attention\.temperature_scale"
    r"|kimi-linear\.expert_(group_count|weights_norm)|laguna\.attention\.sliding_window"
    # The converters of GPT-2 and GPT-NeoX leave these out, as all heads have keys.
    r"|(gpt2|gptneox)\.attention\.head_count_kv|general\.file_type"
)


def checkpoint_of(name: str, directory: Path) -> Path:
    """Save a model of MODELS with a tokenizer of as many tokens."""
    save(original(name), directory)
    vocabulary = {f"t{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(directory / "tokenizer.json"))
    return directory


def content(path: Path, tensor: GgufTensor) -> bytes:
    with path.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.num_bytes)


def contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {one.name: (one.format.name, one.shape, content(path, one)) for one in open_gguf(path).tensors}


@pytest.mark.parametrize("name", WRITTEN)
def test_files_are_those_of_the_converter_of_llama_cpp(name: str, tmp_path: Path) -> None:
    model = checkpoint_of(name, tmp_path / "model")
    ours, theirs = write(model, tmp_path / "ours.gguf", "f32"), write_file(name, tmp_path)
    written, expected = encoded_values(ours), encoded_values(theirs)
    for key, value in expected.items():
        is_spare = name == "granite-4" and _MORE_OF_GRANITE4.fullmatch(key)
        if _DIFFERENT.fullmatch(key) is None and not is_spare:
            assert written[key] == value, (key, open_gguf(ours).values[key], open_gguf(theirs).values[key])
    assert not [key for key in written.keys() - expected.keys() if _MORE.fullmatch(key) is None]
    # The converter keeps the gates and ups of these experts together; llama.cpp reads both forms.
    assert name in ("gemma-4-26b-a4b", "mistral-4") or contents(ours) == contents(theirs)
    if name in TILED | SEPARATED:
        return
    with open_source(ours) as source, open_source(model) as original_source:
        assert set(source.names()) == set(original_source.names())
        for tensor_name in source.names():
            ours_of, theirs_of = source.get(tensor_name), original_source.get(tensor_name)
            if tensor_name.endswith("A_log"):  # A file has exp() of it, which several numbers share.
                ours_of, theirs_of = ours_of.exp(), theirs_of.exp()
            assert torch.equal(ours_of, theirs_of), tensor_name


def test_the_first_files_of_gpt_2_have_shorter_names_and_masks(tmp_path: Path) -> None:
    model = checkpoint_of("gpt2", tmp_path / "model")
    expected = contents(write(model, tmp_path / "expected.gguf", "f32"))
    file = model / "model.safetensors"
    tensors = {tensor_name.removeprefix("transformer."): one for tensor_name, one in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, file)
    assert contents(write(model, tmp_path / "bare.gguf", "f32")) == expected


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3.5-multimodal", "qwen3.5-moe-multimodal", "ministral-3-multimodal", "minicpm-v-4.6"),
        *("gemma-4-multimodal", "gemma-4-12b-multimodal"),
    ],
)
def test_text_parts_of_models_that_see_images(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "m")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({f"t{token_id}": token_id for token_id in range(193)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(tmp_path / "m" / "tokenizer.json"))
    with planned_export(tmp_path / "m", "m", "f32") as (_, notes):
        assert any("text part only, without model.visual" in note for note in notes) == name.startswith("qwen")
    found, prompts = [], make_prompts((1, 33), vocab_size=180)
    for path in (tmp_path / "m", write(tmp_path / "m", tmp_path / "m.gguf", "f32")):
        with running(path, dtype="float32") as engine:
            found.append(answers(engine, prompts, num_tokens=8))
    for theirs, ours in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-3, rtol=0)


def test_the_vision_part_beside_a_flat_config_is_left_out(tmp_path: Path) -> None:
    """As files that were cut out of Qwen3.5 may have it: entries of the text part among the others."""
    model = checkpoint_of("qwen3.5", tmp_path / "m")
    expected = write(model, tmp_path / "text.gguf", "f32")
    config = json.loads((model / "config.json").read_text())
    vision = {**VARIANTS["qwen3.5-multimodal"].entries["vision_config"], "out_hidden_size": config["hidden_size"]}
    whole = {**config, "architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": vision}
    (model / "config.json").write_text(json.dumps({**whole, "image_token_id": 5}))
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "model.visual.pos_embed.weight": torch.zeros(2, 2)}, model / "model.safetensors")
    assert contents(write(model, tmp_path / "part.gguf", "f32")) == contents(expected)
    with planned_export(model, "m", "f32") as (_, notes):
        assert notes == ["the file holds the text part only, without model.visual.pos_embed.weight and its like"]


@pytest.mark.parametrize("kind", TYPES if IS_DEEP else ["f16", "bf16", "q8_0", "q4_k_m", "q2_k"])
def test_types_of_the_built_in_model(kind: str, tmp_path: Path) -> None:
    path = write(MODEL_DIR, tmp_path / "m.gguf", kind)
    weights = load_file(MODEL_DIR / "model.safetensors")
    checked = 0
    with open_source(path) as source:
        for piece in open_gguf(path).pieces:
            weight, stored = weights[piece.name], source.get(piece.name)
            if weight.ndim == 1:
                assert torch.equal(stored, weight.float())
            elif stored.dtype == torch.uint8:
                assert torch.equal(stored, quantize_weight(weight.float(), str(source.stored_type(piece.name))))
            else:
                assert torch.equal(stored, weight.to(FLOATS[kind]))
            checked += 1
    assert checked == len(weights)
    again = write(write(MODEL_DIR, tmp_path / "f32.gguf", "f32"), tmp_path / "again.gguf", kind)
    assert again.read_bytes() == path.read_bytes()


def test_other_models_copy_exactly_from_file_to_file(tmp_path: Path) -> None:
    for name in ("gemma-2b", "deepseek-v2", "mixtral"):
        source = write_file(name, tmp_path)
        copy = write(source, tmp_path / f"{name}-copy.gguf", "f32")
        assert contents(copy) == contents(source)
        kept = {key: value for key, value in encoded_values(source).items() if key != "general.file_type"}
        assert kept.items() <= encoded_values(copy).items()


def test_rows_that_blocks_do_not_fit(tmp_path: Path) -> None:
    path = write(checkpoint_of("qwen3-moe", tmp_path / "m"), tmp_path / "q4.gguf", "q4_k_m")
    types = {tensor.name: tensor.format.name for tensor in open_gguf(path).tensors}
    assert types["blk.0.attn_q.weight"] == "Q5_0" and types["output.weight"] == "Q8_0"
    assert types["blk.1.ffn_gate_inp.weight"] == types["blk.1.attn_norm.weight"] == "F32"
    assert open_gguf(path).values["general.file_type"] == 15


def test_spellings_of_types() -> None:
    for spelling in ("q4_k_m", "Q4_K_M", "q4-k-m", "Q4KM"):
        assert type_named(spelling) == "q4_k_m"
    assert (type_named("BF16"), type_named("fp16")) == ("bf16", "f16")
    with pytest.raises(ConfigError, match=r"^q9 is no type that can be written\n  choose from: f32, f16, .*q6_k"):
        type_named("q9")


# At load, tables of embeddings for each layer are no part of a tied head, and latents count among the values beside
# those of linear attention.
OTHER_AT_LOAD: Final = ("gemma-3n", "gemma-4-e2b", "ling-3-flash", "ling-3-tiny", "kimi-linear")
AS_AT_LOAD: Final = [name for name in WRITTEN if name not in OTHER_AT_LOAD]


@pytest.mark.parametrize("name", [*AS_AT_LOAD, *(f"wide/{name}" for name in ("mixtral", "qwen3", "phi-3-mini-4k"))])
def test_types_are_those_of_quantization_at_load(name: str, tmp_path: Path) -> None:
    checkpoint = open_gguf(write_file(name, tmp_path))
    model = read_config(checkpoint.config)
    weights = {piece.name: piece.shape for piece in checkpoint.pieces}
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    for mix in MIXES.keys() & set(TYPES):
        types, formats = types_of(mix, shapes, mixed_model(model, has_importance=False)), {}
        for piece in checkpoint.pieces:
            if isinstance(piece, Piece) and FORMATS_BY_NAME[types[piece.tensor.name]].num_elements > 1:
                formats[piece.name] = types[piece.tensor.name]
        joined = {piece.name for piece in checkpoint.pieces if isinstance(piece, JoinedPiece)}
        expected = plan_quantization(mix, weights, {}, model).formats
        assert formats == {key: kind for key, kind in expected.items() if key not in joined}, mix


def test_responses_are_those_of_quantization_at_load(tmp_path: Path) -> None:
    prompts = make_prompts((70, 5), vocab_size=4000)
    found = []
    path = write(MODEL_DIR, tmp_path / "m.gguf", "q4_k_m")
    for model, options in ((path, {}), (MODEL_DIR, {"quantization": "q4_k_m", "quantized_cache": False})):
        with running(model, dtype="bfloat16", num_threads=1, **options) as engine:
            found.append(answers(engine, prompts, num_tokens=8))
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids and torch.equal(ours.logits, theirs.logits)


def refusal(model: Path, directory: Path, kind: str = "q8_0") -> str:
    with pytest.raises((ModelLoadError, ConfigError)) as caught:
        write(model, directory / "out.gguf", kind)
    assert sorted(directory.iterdir()) == [model]
    return str(caught.value)


def changed(directory: Path, entries: Mapping[str, Any]) -> Path:
    """Return a copy of the built-in model with other entries in config.json."""
    shutil.copytree(MODEL_DIR, directory)
    config = json.loads((directory / "config.json").read_text()) | entries
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ({"architectures": ["Qwen9ForCausalLM"]}, "architecture Qwen9ForCausalLM is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
            "the weights are GPTQ int4 g128, and none of them is\n  config.json and the weights do not belong together",
        ),
        (
            {"hidden_act": "gelu"},
            r"files of Qwen3ForCausalLM have no key for .*: hidden_act \"gelu\"\n  use the checkpoint",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "no key for what config.json says: .*its rotary embedding",
        ),
        ({"intermediate_size": 512}, r"has the shape \[256, 768\], and config.json means \[256, 512\]"),
    ],
)
def test_models_that_files_cannot_describe(entries: Mapping[str, Any], complaint: str, tmp_path: Path) -> None:
    assert re.search(complaint, refusal(changed(tmp_path / "m", entries), tmp_path))


@pytest.mark.parametrize(
    ("variant", "entries", "said"),
    [
        ("qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob false"),
        ("gemma-2", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar 100"),
    ],
)
def test_what_files_cannot_say_is_named_as_config_json_spells_it(
    variant: str, entries: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    model = checkpoint_of(variant, tmp_path / "m")
    config = json.loads((model / "config.json").read_text()) | entries
    (model / "config.json").write_text(json.dumps(config))
    assert f"have no key for what config.json says: {said}\n" in refusal(model, tmp_path)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WRITTEN])
def test_architectures_that_are_only_read_are_refused(name: str, tmp_path: Path) -> None:
    message = refusal(checkpoint_of(name, tmp_path / "m"), tmp_path)
    assert re.search(
        r"(can be read, and not|cannot) be written (as a GGUF file )?yet\n  use the checkpoint as it is", message
    )


def test_a_window_without_a_key_is_noted(tmp_path: Path) -> None:
    entries = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}
    model = changed(tmp_path / "m", entries)
    with planned_export(model, "m", "q8_0") as (_, notes):
        assert notes == [
            "GGUF files of Qwen3ForCausalLM have no key for its window: a response may differ after 100 tokens"
        ]
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert check_same(config, config) == []


def test_tables_and_keys_that_llama_cpp_wants_are_written(tmp_path: Path) -> None:
    """Gemma 3n's published checkpoints have keys that no layer uses, and no row of inputs for its last tokens."""
    model = checkpoint_of("gemma-3n", tmp_path / "m")
    config = json.loads((model / "config.json").read_text()) | {"vocab_size_per_layer_input": 80}
    (model / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    table = "model.embed_tokens_per_layer.weight"
    weights[table] = weights[table][:80].clone()
    save_file(weights, model / "model.safetensors")
    with planned_export(model, "m", "f32") as (_, notes):
        assert notes == ["llama.cpp does not load it: m lacks keys and values of layers that borrow those of others"]
    borrower = "model.layers.3.self_attn"
    unused = {f"{borrower}.{kind}_proj.weight": torch.full((32, 96), 0.5) for kind in "kv"}
    unused[f"{borrower}.k_norm.weight"] = torch.ones(16)
    save_file({**weights, **unused}, model / "model.safetensors")
    with planned_export(model, "m", "f32") as (_, notes):
        assert notes == []
    path = write(model, tmp_path / "m.gguf", "f32")
    with open_source(path) as source:
        rows = source.get(table)
        assert torch.equal(rows[:80], weights[table])
        assert torch.equal(rows[80:], weights[table][:1].expand(17, -1))
        assert all(torch.equal(source.get(name), weight) for name, weight in unused.items())
    found, prompts = [], [[5, 96, 80, 81, 7, 79, 3, 90]]
    for place in (model, path):
        with running(place, dtype="float32") as engine:
            found += answers(engine, prompts, num_tokens=4)
    assert found[0].token_ids == found[1].token_ids
    assert torch.equal(found[0].logits, found[1].logits)


def test_a_quantized_file_is_refused(tmp_path: Path) -> None:
    path = write(MODEL_DIR, tmp_path / "q8.gguf", "q8_0")
    assert "is quantized already: token_embd.weight is Q8_0\n  quantize the original" in refusal(path, tmp_path)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = changed(tmp_path / "m", {})
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(model, tmp_path)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    model = changed(tmp_path / "m", {})
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors")
    assert "lacks 1 tensor of this model: model.layers.1.mlp.up_proj.weight" in refusal(model, tmp_path)
    weights["model.layers.1.mlp.side_proj.weight"] = torch.zeros(2, 2)
    save_file(weights, model / "model.safetensors")
    assert "no place for 1 tensor: model.layers.1.mlp.side_proj.weight" in refusal(model, tmp_path)


@pytest.mark.parametrize(
    ("value", "kind", "complaint"),
    [
        (float("nan"), "q4_0", "not finite.*\n  the weights are damaged: download the model again$"),
        (1e9, "q4_0", "not finite or above 2.28.*\n  choose the type bf16, or f32$"),
        (1e5, "f16", "too large for float16\n  choose the type bf16$"),
    ],
)
def test_numbers_that_a_type_cannot_store(value: float, kind: str, complaint: str, tmp_path: Path) -> None:
    model = changed(tmp_path / "m", {})
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, model / "model.safetensors")
    message = refusal(model, tmp_path, kind)
    assert message.startswith("blk.1.ffn_up.weight") and re.search(complaint, message)


@pytest.mark.parametrize(
    ("variant", "architecture", "entries"),
    [
        ("gemma-3-1b", "Gemma3ForConditionalGeneration", {}),
        # Llama is Mistral without a window.
        ("llama3-rope", "Mistral3ForConditionalGeneration", {"model_type": "mistral", "sliding_window": None}),
        ("qwen3", "LightOnOcrForConditionalGeneration", {}),
        ("command-r7b", "Cohere2VisionForConditionalGeneration", {}),
        # Four layers, and one that predicts later tokens.
        (
            "exaone-4-32b",
            "Exaone4_5_ForConditionalGeneration",
            {"layer_types": [*["sliding_attention"] * 3, *["full_attention"] * 2]},
        ),
    ],
)
def test_the_text_part_of_a_model_that_sees_images(
    variant: str, architecture: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    model = checkpoint_of(variant, tmp_path / "m")
    expected = write(model, tmp_path / "text.gguf", "f32")
    text = {**json.loads((model / "config.json").read_text()), **entries}
    vision = {"out_hidden_size": text["hidden_size"]}
    whole = {"architectures": [architecture], "text_config": text, "vision_config": vision}
    whole["tie_word_embeddings"] = text["tie_word_embeddings"]
    (model / "config.json").write_text(json.dumps(whole))
    weights = load_file(model / "model.safetensors")
    renamed = {f"language_model.{name}": weight for name, weight in weights.items()}
    save_file({**renamed, "vision_tower.x.weight": torch.zeros(2, 2)}, model / "model.safetensors")
    found = write(model, tmp_path / "part.gguf", "f32")
    assert contents(found) == contents(expected)
    assert encoded_values(found) == encoded_values(expected)
    with planned_export(model, "m", "f32") as (_, notes):
        assert notes == ["the file holds the text part only, without vision_tower.x.weight and its like"]


def test_sizes_in_labels(tmp_path: Path) -> None:
    values = open_gguf(write(MODEL_DIR, tmp_path / "m.gguf", "q8_0")).values
    total = sum(prod(weight.shape) for weight in load_file(MODEL_DIR / "model.safetensors").values())
    assert values["general.size_label"] == f"{total / 1e6:.1f}M"
