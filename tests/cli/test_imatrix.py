"""`pagewick imatrix`, and what `pagewick quantize --imatrix` makes of its file."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

from pagewick.cli import cli
from pagewick.cli.imatrix import read, read_chunks
from pagewick.cli.quantizing.metadata import text_config
from pagewick.cli.quantizing.observation import Observation
from pagewick.cli.quantizing.plan import planned_export
from pagewick.demo import MODEL_DIR
from pagewick.engine.model_loading import read_model_config
from pagewick.errors import ConfigError
from pagewick.kernels import quantize_weight
from pagewick.layers.latent_attention import LatentProjection
from pagewick.models.registry import read_config
from pagewick.text.tokenizer import Tokenizer
from pagewick.weights.description import describe
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.importance import Importance, read_importance, write_importance
from pagewick.weights.gguf.naming import architecture_named, gguf_name
from pagewick.weights.opening import open_source
from tests.models.answers import running
from tests.models.checkpoints import save, write_checkpoint
from tests.weights.gguf.models import VOCAB_SIZE, original, write_file
from tests.weights.gguf.written import write

TEXT: Final = "Pagewick serves language models. It keeps keys and values in pages, and finds prefixes again. " * 40


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["imatrix", *map(str, arguments), "--num-threads", "1"])


@contextmanager
def inputs_of(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the inputs of all linear layers of a transformers model by the names of their weights."""
    found: dict[str, list[Tensor]] = {}

    def collect(name: str) -> Any:
        return lambda module, arguments: found.setdefault(f"{name}.weight", []).append(arguments[0].flatten(0, -2))

    hooks = [
        module.register_forward_pre_hook(collect(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]
    yield found
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", ["qwen3", "phi-3-mini-4k", "starcoder2-3b"])
def test_sums_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = original(name)
    save(model, tmp_path)
    architecture = architecture_named(model.config.architectures[0])[1]
    chunks = torch.randint(2, VOCAB_SIZE, (2, 70), generator=torch.Generator().manual_seed(1))
    with inputs_of(model) as inputs, torch.no_grad():
        model(chunks)
    with running(tmp_path, num_threads=1) as engine:
        observation = Observation(engine.model, read_model_config(tmp_path))
        for index, chunk in enumerate(chunks.tolist()):
            read(engine, index, chunk)
        observation.close()
        read(engine, 9, chunks[0].tolist())
    expected = {gguf_name(key, architecture): torch.cat(rows) for key, rows in inputs.items()}
    assert {(key, None) for key in observation.sums} == expected.keys()
    for key, (sums, counts) in observation.sums.items():
        rows = expected[key, None]
        assert counts.tolist() == [140]
        torch.testing.assert_close(sums[0].float(), rows.square().sum(0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2", "glm-5.2"])
def test_sums_of_latent_attention_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Indexers' too, but for their routers."""
    model = original(name)
    save(model, tmp_path)
    architecture = architecture_named(model.config.architectures[0])[1]
    chunk = torch.randint(2, VOCAB_SIZE, (1, 70), generator=torch.Generator().manual_seed(1))
    with inputs_of(model) as inputs, torch.no_grad():
        model(chunk)
    with running(tmp_path, num_threads=1) as engine:
        observation = Observation(engine.model, read_model_config(tmp_path))
        read(engine, 0, chunk[0].tolist())
        observation.close()
    compared = {key: rows for key, rows in inputs.items() if "self_attn" in key and "weights_proj" not in key}
    assert any("kv_b_proj" in key for key in compared)
    assert any(".indexer.wq_b" in key for key in compared) == (name != "deepseek-v3")
    for key, rows in compared.items():
        stored = gguf_name(key, architecture)
        assert stored is not None
        sums, counts = observation.sums[stored[0]]
        assert counts.tolist() == [70]
        torch.testing.assert_close(sums[0].float(), torch.cat(rows).square().sum(0), rtol=1e-3, atol=1e-5)


def test_sums_of_the_heads_of_latent_attention_are_those_of_transformers(tmp_path: Path) -> None:
    """Files have the two products with each head, of queries and of the sums of latents, as tensors of their own."""
    model = original("deepseek-v3")
    save(model, tmp_path)
    chunk = torch.randint(2, VOCAB_SIZE, (1, 70), generator=torch.Generator().manual_seed(1))
    with inputs_of(model) as inputs, torch.no_grad():
        attentions = model(chunk, output_attentions=True).attentions
    with running(tmp_path, num_threads=1) as engine:
        projections = [one for one in engine.model.modules() if isinstance(one, LatentProjection)]
        products = [(one.queries, one.values) for one in projections]
        observation = Observation(engine.model, read_model_config(tmp_path))
        read(engine, 0, chunk[0].tolist())
        observation.close()
        assert [(one.queries, one.values) for one in projections] == products
    config = model.config
    for layer, weights in enumerate(attentions):
        attention = f"model.layers.{layer}.self_attn"
        (rows,), (latents,) = inputs[f"{attention}.q_b_proj.weight"], inputs[f"{attention}.kv_b_proj.weight"]
        queries = rows @ model.get_parameter(f"{attention}.q_b_proj.weight").T
        nope = queries.view(70, config.num_attention_heads, -1)[..., : config.qk_nope_head_dim]
        for name, expected in (("attn_k_b", nope.transpose(0, 1)), ("attn_v_b", weights[0] @ latents)):
            sums, counts = observation.sums[f"blk.{layer}.{name}.weight"]
            assert counts.tolist() == [70] * config.num_attention_heads
            torch.testing.assert_close(sums.float(), expected.square().sum(1), rtol=1e-3, atol=1e-5)


def test_latent_attention_in_a_file_has_all_of_its_importance(tmp_path: Path) -> None:
    from tests.weights.gguf.test_export import checkpoint_of

    model, chunk = checkpoint_of("deepseek-v3", tmp_path / "m"), list(range(2, 72))
    with running(model, num_threads=1) as engine:
        observation = Observation(engine.model, read_model_config(model))
        read(engine, 0, chunk)
        observation.close()
    write_importance(tmp_path / "i.gguf", observation.sums, "text", 1, 70, is_forced=False)
    importance = read_importance(tmp_path / "i.gguf")
    with planned_export(model, "m", "q8_0", importance) as (export, notes):
        assert not [note for note in notes if "has no importance" in note]
        assert {"blk.1.attn_k_b.weight", "blk.1.attn_v_b.weight"} <= export.importance.keys()


@pytest.mark.parametrize("name", ["smolvlm", "gemma-3-multimodal", "internvl", "lfm2-vl"])
def test_models_that_see_have_the_importance_of_their_text_parts(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    config = read_config(text_config(describe(tmp_path).config))
    with running(tmp_path, num_threads=1) as engine:
        observation = Observation(engine.model, config)
        read(engine, 0, list(range(2, 72)))
        observation.close()
    layers = {key.split(".")[1] for key in observation.sums}
    assert layers == {str(layer) for layer in range(config.num_layers)}
    assert {"blk.1.attn_q.weight", "blk.1.attn_output.weight", "blk.1.ffn_down.weight"} <= observation.sums.keys()


def test_experts_count_the_tokens_that_choose_them(tmp_path: Path) -> None:
    model = original("mixtral")
    save(model, tmp_path)
    chunk = torch.randint(2, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with running(tmp_path, num_threads=1) as engine:
        before = list(engine.model.modules())
        observation = Observation(engine.model, read_model_config(tmp_path))
        read(engine, 0, chunk)
        observation.close()
        assert list(engine.model.modules()) == before
    num_experts, top_k = model.config.num_local_experts, model.config.num_experts_per_tok
    for layer in range(model.config.num_hidden_layers):
        gate, up, down = (observation.sums[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        query = observation.sums[f"blk.{layer}.attn_q.weight"]
        assert gate[0].shape == (num_experts, 96) and int(gate[1].sum()) == 70 * top_k and query[1].tolist() == [70]
        assert torch.equal(gate[0], up[0]) and torch.equal(gate[1], down[1]) and len(set(gate[1].tolist())) > 1
        assert (down[0][down[1] > 0] > 0).any(dim=1).all() and (down[0][down[1] == 0] == 0).all()


STATES: Final = (
    *("qwen3.5", "qwen3.5-moe", "qwen3-next", "granite-4-h", "granite-4-h-moe", "bamba", "nemotron-h"),
    "nemotron-3-latents",
)


@pytest.mark.parametrize("name", [*STATES, "granite-4", "lfm2", "lfm2-moe"])
def test_checkpoints_and_files_have_the_same_names_and_columns(name: str, tmp_path: Path) -> None:
    save(original(name), tmp_path / "checkpoint")
    chunk = torch.randint(2, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for path in (tmp_path / "checkpoint", write_file(name, tmp_path)):
        config = read_model_config(path)
        with running(path, num_threads=1) as engine:
            observation = Observation(engine.model, config)
            read(engine, 0, chunk)
            observation.close()
        found.append(observation.sums)
    assert found[0].keys() == found[1].keys() and ("blk.0.ssm_out.weight" in found[0]) == (name in STATES)
    for key, (sums, counts) in found[0].items():
        theirs, their_counts = found[1][key]
        assert torch.equal(counts, their_counts), key
        torch.testing.assert_close(sums, theirs, rtol=1e-2, atol=1e-4)


def test_the_built_in_model(tmp_path: Path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "imatrix.gguf"
    text.write_text(TEXT)
    result = run("pagewick-demo", "--text", text, "-o", output, "--chunk-size", "128", "--max-chunks", "2")
    assert result.exit_code == 0, result.output
    assert "imatrix.gguf: importance of 35 weights, from 256 tokens" in result.stdout
    reader = gguf.GGUFReader(output)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert (fields["general.type"], fields["imatrix.datasets"]) == ("imatrix", ["text.txt"])
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (2, 128)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["blk.0.ffn_down.weight.in_sum2"].data.shape == (1, 768)
    assert tensors["blk.4.attn_q.weight.counts"].data.tolist() == [[256.0]]
    importance = read_importance(output)
    assert importance.name == "imatrix.gguf" and importance.means["blk.0.ffn_down.weight"].shape == (1, 768)
    assert "imatrix.gguf exists already" in run("pagewick-demo", "--text", text, "-o", output).stderr

    plain = write(MODEL_DIR, tmp_path / "plain.gguf", "q4_k_m")
    path = write(MODEL_DIR, tmp_path / "weighed.gguf", "q4_k_m", importance)
    values = open_gguf(path).values
    assert values["quantize.imatrix.file"] == "imatrix.gguf" and values["quantize.imatrix.entries_count"] == 35
    name = "model.layers.1.mlp.up_proj.weight"
    with open_source(MODEL_DIR) as source, open_source(path) as weighed, open_source(plain) as unweighed:
        expected = quantize_weight(source.get(name), "Q4_K", importance.means["blk.1.ffn_up.weight"][0])
        assert torch.equal(weighed.get(name), expected) and not torch.equal(unweighed.get(name), expected)


def test_experts_have_importance_of_their_own(tmp_path: Path) -> None:
    from tests.weights.gguf.test_export import checkpoint_of

    model = checkpoint_of("qwen3-moe", tmp_path / "m")
    shapes = {tensor.name: tensor.shape for tensor in open_gguf(write(model, tmp_path / "f32.gguf", "f32")).tensors}
    generator = torch.Generator().manual_seed(1)
    means = {
        name: torch.rand(shape[0] if len(shape) > 2 else 1, shape[-1], generator=generator) + 0.01
        for name, shape in shapes.items()
        if len(shape) > 1 and "embd" not in name and name != "output.weight"
    }
    path = write(model, tmp_path / "q4.gguf", "q4_0", Importance(means, "random"))
    name = "model.layers.1.mlp.experts.5.gate_proj.weight"
    with open_source(model) as source, open_source(path) as found:
        weight = source.get(name).float()
        assert torch.equal(found.get(name), quantize_weight(weight, "Q4_0", means["blk.1.ffn_gate_exps.weight"][5]))


def legacy(entries: dict[str, tuple[int, list[float]]]) -> bytes:
    content = struct.pack("<i", len(entries))
    for name, (num_calls, numbers) in entries.items():
        head = struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", num_calls, len(numbers))
        content += head + np.array(numbers, np.float32).tobytes()
    return content


def test_the_older_format(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(legacy({"blk.0.attn_q.weight": (4, [4.0, 8.0]), "x": (0, [1.0])}))
    means = read_importance(path).means
    assert means["blk.0.attn_q.weight"].tolist() == [1.0, 2.0] and means["x"].tolist() == [1.0]


@pytest.mark.parametrize(
    "content",
    [b"", b"xy", b"a text that is no importance matrix", legacy({"x": (1, [1.0, float("nan")])}),
     legacy({"x": (1, [2.0])})[:-1], legacy({"x": (1, [-1.0])}), struct.pack("<ii", 1, -5)],
)  # fmt: skip
def test_files_that_are_no_importance_matrix(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="importance matrix"):
        read_importance(path)


def test_a_model_is_no_importance_matrix(tmp_path: Path) -> None:
    path = write(MODEL_DIR, tmp_path / "m.gguf", "q4_0")
    with pytest.raises(ConfigError, match="is a GGUF file, and no importance matrix\n  make one with pagewick imatrix"):
        read_importance(path)


def test_importance_of_another_model(tmp_path: Path) -> None:
    other = Importance({"blk.77.attn_q.weight": torch.ones(1, 256)}, "other.gguf")
    with pytest.raises(ConfigError, match=r"other.gguf has no importance for blk\.0\..* and \d+ more\n  it belongs to"):
        write(MODEL_DIR, tmp_path / "m.gguf", "q4_0", other)
    other = Importance({"blk.0.attn_q.weight": torch.ones(1, 96)}, "other.gguf")
    with pytest.raises(ConfigError, match=r"has 96 numbers for blk\.0\.attn_q\.weight, whose columns are \[256\]"):
        write(MODEL_DIR, tmp_path / "m.gguf", "q4_0", other)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_types_that_round_no_weights_have_no_use_for_importance(kind: str, tmp_path: Path) -> None:
    importance = Importance({"blk.0.attn_q.weight": torch.ones(1, 256)}, "own.gguf")
    with pytest.raises(ConfigError, match=f"own.gguf has no effect: no weight is quantized in {kind}\n  leave it out"):
        write(MODEL_DIR, tmp_path / "m.gguf", kind, importance)


def test_texts_are_read_in_pieces(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "text.txt", Tokenizer.from_directory(MODEL_DIR)
    path.write_text(TEXT)
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    chunks = read_chunks(path, tokenizer, 200)
    assert [*itertools.chain(*chunks)] == token_ids[: sum(map(len, chunks))]
    assert {len(chunk) for chunk in chunks[:-1]} == {200}
    assert len(token_ids) - sum(map(len, chunks)) < 65
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert read_chunks(path, tokenizer, 200) == chunks
    path.write_text("too short")
    with pytest.raises(ConfigError, match=r"has \d tokens, and at least 65 are needed; give a longer text"):
        read_chunks(path, tokenizer, 200)
    path.write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(ConfigError, match=r"cannot read .*\n  give a file of UTF-8 text"):
        read_chunks(path, tokenizer, 200)
