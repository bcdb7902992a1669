"""Files in all of ggml's types: what they stand for, the memory that they take, and those that are refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.doctor.checkpoint import open_checkpoint
from pagewick.doctor.plan import Device
from pagewick.engine.messages import EngineRequest
from pagewick.engine.preflight import FoundModel, WeightBytes, check_models
from pagewick.errors import ConfigError, ModelLoadError, UnsupportedError
from pagewick.kernels.block_formats import unpack
from pagewick.quantization.block_formats import BLOCK_FORMATS, OWN_FORMATS
from pagewick.sampling_params import SamplingParams
from pagewick.weights.description import describe
from pagewick.weights.gguf.source import GgufSource
from tests.doctor.test_model import described
from tests.kernels.block_rows import EXPANDED, LAYOUTS
from tests.models.answers import answers, make_prompts, running
from tests.models.test_embeddings import pooled
from tests.weights.gguf import random_models
from tests.weights.gguf.mixes import Numbers, rewrite
from tests.weights.gguf.random_models import VOCAB_SIZE, dequantized, random_blocks, write_random

TYPES = (*LAYOUTS, *EXPANDED)
OURS = {
    "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj", "ffn_gate": "gate_proj",
    "ffn_up": "up_proj", "ffn_down": "down_proj",
}  # fmt: skip


def in_turn(stem: str) -> str:
    """A type for each matrix of a layer, by its name; the experts' are IQ types."""
    chosen = {
        "attn_q": "IQ1_M", "attn_k": "IQ2_S", "attn_v": "Q6_K", "attn_output": "IQ3_S", "ffn_gate": "IQ4_XS",
        "ffn_up": "MXFP4", "ffn_down": "TQ1_0", "token_embd": "IQ4_NL", "output": "NVFP4", "ffn_gate_exps": "IQ2_XXS",
        "ffn_up_exps": "IQ3_XXS", "ffn_down_exps": "IQ2_XS",
    }  # fmt: skip
    return chosen[stem]


@pytest.mark.parametrize("name", TYPES)
def test_tensors_are_those_that_gguf_reads(name: str, tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", "dense", name)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with GgufSource(path) as source:
        for stem, ours in OURS.items():
            rows = torch.from_numpy(stored[f"blk.1.{stem}.weight"].data.copy())
            found_name = f"model.layers.1.{'self_attn' if 'attn' in stem else 'mlp'}.{ours}.weight"
            found = source.get(found_name)
            assert source.stored_type(found_name) == name and found.shape == source.shape(found_name)
            assert source.dtype(found_name) == found.dtype == torch.uint8
            assert torch.equal(found, rows)


def test_experts_are_taken_from_their_stack(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", "experts", in_turn)
    (stack,) = (tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up_exps.weight")
    expected = dequantized("IQ3_XXS", torch.from_numpy(stack.data.copy()))
    with GgufSource(path) as source:
        for expert in range(4):
            name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
            assert source.stored_type(name) == "IQ3_XXS"
            assert torch.equal(dequantized("IQ3_XXS", source.get(name)), expected[expert])


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_model_of_many_types_computes_what_its_numbers_say(kind: str, tmp_path: Path) -> None:
    """Activations are rounded to 8 bits, and each of these weights is far from a normal distribution."""
    files = [
        write_random(tmp_path / f"{is_expanded}.gguf", kind, in_turn, is_expanded=is_expanded)
        for is_expanded in (False, True)
    ]
    assert difference(files) < 0.05


def difference(files: Iterable[Path]) -> float:
    """How far the logits of two models are from each other, relative to the second's."""
    found = []
    for file in files:
        with running(file) as engine:
            found.append(torch.cat([answer.logits for answer in answers(engine, make_prompts((9, 1)), num_tokens=1)]))
    ours, theirs = found
    assert ours.shape[-1] == VOCAB_SIZE
    return float((ours - theirs).norm() / theirs.norm())


def is_quantized(name: str, numbers: Numbers) -> bool:
    return numbers.ndim > 1 and "ffn_gate_inp" not in name


def test_whole_tensors_in_nvfp4_may_have_a_scale(tmp_path: Path) -> None:
    """Experts have one each, as llama.cpp's converter writes them. Scales of inputs are not used."""
    expected: dict[str, Tensor] = {}

    def scaled(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
        if not is_quantized(name, numbers):
            yield name, numbers, "F32"
            return
        rows = random_blocks("NVFP4", *numbers.shape, seed=len(expected))
        scales = torch.rand(numbers.shape[0] if numbers.ndim == 3 else 1) + 0.5
        expected[name] = dequantized("NVFP4", rows) * scales.view(-1, *[1] * (numbers.ndim - 1))
        owner = name.removesuffix(".weight")
        yield name, rows.numpy(), "NVFP4"
        yield f"{owner}.scale", scales.numpy(), "F32"
        yield f"{owner}.input_scale", 3 * scales.numpy(), "F32"

    def plain(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
        yield name, expected[name].numpy() if name in expected else numbers, "F32"

    original = write_random(tmp_path / "original.gguf", "experts", "F32")
    files = [rewrite(original, tmp_path / f"{change.__name__}.gguf", change) for change in (scaled, plain)]
    with GgufSource(files[0]) as source:
        for name, numbers in (
            ("model.layers.1.self_attn.q_proj.weight", expected["blk.1.attn_q.weight"]),
            ("model.layers.0.mlp.experts.2.up_proj.weight", expected["blk.0.ffn_up_exps.weight"][2]),
        ):
            assert source.stored_type(name) == "fp4_g16" and source.get(name).shape == source.shape(name)
            torch.testing.assert_close(unpack("fp4_g16", source.get(name)).numbers(), numbers, rtol=2e-7, atol=0)
    assert difference(files) < 0.05


def test_a_scale_of_another_type_is_refused(tmp_path: Path) -> None:
    def scaled(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
        yield name, numbers, "F32"
        if name == "blk.0.attn_q.weight":
            yield "blk.0.attn_q.scale", numbers[0, :1], "F32"

    path = rewrite(write_random(tmp_path / "original.gguf", "dense", "F32"), tmp_path / "m.gguf", scaled)
    with pytest.raises(ModelLoadError, match=r"that Qwen3ForCausalLM does not have: blk\.0\.attn_q\.scale\n"):
        check_models(EngineConfig(model=str(path)))


def test_experts_of_a_layer_may_have_different_types(tmp_path: Path) -> None:
    """Mixtral's first files have a tensor for each expert, whose types depend on the number of tensors before it."""
    kinds, expected = ("Q4_K", "Q6_K", "Q5_0", "Q4_K"), {}

    def separated(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
        if "_exps." not in name:
            yield name, numbers, "F32"
            return
        rows = [
            random_blocks(kind, *numbers.shape[1:], std=0.05, seed=len(expected) + i) for i, kind in enumerate(kinds)
        ]
        expected[name] = torch.stack([dequantized(kind, found) for kind, found in zip(kinds, rows, strict=True)])
        for expert, (kind, found) in enumerate(zip(kinds, rows, strict=True)):
            yield name.replace("_exps.", f".{expert}."), found.numpy(), kind

    def plain(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
        yield name, expected[name].numpy() if name in expected else numbers, "F32"

    original = write_random(tmp_path / "original.gguf", "experts", "F32")
    files = [rewrite(original, tmp_path / f"{change.__name__}.gguf", change) for change in (separated, plain)]
    assert 0 < difference(files) < 0.05


def test_one_line_says_what_is_expanded(tmp_path: Path) -> None:
    kinds = {"ffn_up": "IQ4_XS", "ffn_down": "IQ2_S"}
    path = write_random(tmp_path / "m.gguf", "dense", lambda stem: kinds.get(stem, "Q4_K"))
    with GgufSource(path) as source:
        # Two layers of 256 x 512.
        assert source.note == (
            "expanding weights, without a change of their numbers: IQ4_XS (139.3 kB) to iq4_g32 (163.8 kB), "
            "IQ2_S (84.0 kB) to iq2_g16 (196.6 kB)"
        )
    with GgufSource(write_random(tmp_path / "q.gguf", "dense", "Q4_K")) as source:
        assert source.note == ""


def test_expanded_types_take_the_memory_that_they_have_after_it(tmp_path: Path) -> None:
    sizes = {}
    for name in ("IQ4_XS", "TQ2_0", "Q4_0"):
        path = write_random(tmp_path / f"{name}.gguf", "dense", name)
        sizes[name] = WeightBytes.of(EngineConfig(model=str(path)), 1, check_models(EngineConfig(model=str(path)))).all
        assert sum(tensor.num_bytes for tensor in describe(path).tensors) < path.stat().st_size
    assert sizes["TQ2_0"] == sizes["Q4_0"] < sizes["IQ4_XS"]


def test_ranks_cannot_share_a_block(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", "dense", "Q4_K")
    check_models(EngineConfig(model=str(path), tensor_parallel_size=2))
    with pytest.raises(ConfigError) as caught:
        check_models(EngineConfig(model=str(path), tensor_parallel_size=4))
    assert str(caught.value).splitlines() == [
        "--tensor-parallel-size 4 does not fit the model's model.layers.0.self_attn.o_proj.weight: its 512 "
        "columns are in blocks of 256 (Q4_K), and the first rank would get 128",
        "  sizes that work: 1, 2",
    ]
    # In memory, IQ4_XS has blocks of 32.
    path = write_random(tmp_path / "iq.gguf", "dense", "IQ4_XS")
    check_models(EngineConfig(model=str(path), tensor_parallel_size=4))


def test_the_doctor_names_the_sizes_that_cut_no_block(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", "dense", "Q4_K")
    report = described(open_checkpoint(str(path), {}), tensor_parallel_size=4)
    assert report.plan is not None and report.plan.tensor_parallel_sizes == (1, 2) and not report.command
    (finding,) = report.findings
    assert (finding.text, finding.fix) == ("4 ranks would cut weights inside a block", "use 1, 2")


def test_the_doctor_proposes_no_number_of_gpus_that_cuts_a_block(tmp_path: Path) -> None:
    """However little memory they have."""
    path = write_random(tmp_path / "m.gguf", "dense", "Q4_K")
    report = described(open_checkpoint(str(path), {}), Device("cuda", 2**27, 2**27, 8))
    assert report.plan is not None and report.plan.tensor_parallel_size == 2
    assert [finding.subject for finding in report.findings] == ["memory"]


def test_ranks_cannot_share_a_block_of_a_draft_model(tmp_path: Path) -> None:
    path, draft = write_random(tmp_path / "m.gguf", "dense", "F32"), write_random(tmp_path / "d.gguf", "dense", "Q4_K")
    for size in (1, 2):
        check_models(EngineConfig(model=str(path), speculative_model=str(draft), tensor_parallel_size=size))
    with pytest.raises(ConfigError) as caught:
        check_models(EngineConfig(model=str(path), speculative_model=str(draft), tensor_parallel_size=4))
    assert str(caught.value).splitlines() == [
        "--tensor-parallel-size 4 does not fit the draft model's model.layers.0.self_attn.o_proj.weight: its 512 "
        "columns are in blocks of 256 (Q4_K), and the first rank would get 128",
        "  sizes that work: 1, 2",
    ]


def test_ranks_cannot_share_the_heads_of_a_draft_model(tmp_path: Path) -> None:
    path, draft = write_random(tmp_path / "m.gguf", "dense", "F32"), write_random(tmp_path / "d.gguf", "latents", "F32")
    with pytest.raises(ConfigError, match="8 does not divide the draft model's 4 attention heads; sizes that work: 1"):
        check_models(EngineConfig(model=str(path), speculative_model=str(draft), tensor_parallel_size=8))


def test_768_columns_are_cut_at_256_and_not_at_384() -> None:
    """The built-in model, whose 4 heads only 1, 2 or 4 ranks can share."""
    found = describe(MODEL_DIR)
    tensors = (replace(tensor, dtype="Q4_K") if "mlp" in tensor.name else tensor for tensor in found.tensors)
    model = FoundModel.of(replace(found, tensors=tuple(tensors)))
    assert not model.unshared(3) and model.unshared(2).endswith("the first rank would get 384")


def test_a_vector_in_blocks_is_refused(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", "dense", "Q8_0")
    data = path.read_bytes()
    name = b"blk.0.attn_norm.weight"
    # After the name: one dimension, its size, and the type.
    place = data.index(name) + len(name) + 4 + 8
    path.write_bytes(data[:place] + (8).to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(ModelLoadError, match=r"holds the vector blk\.0\.attn_norm\.weight in Q8_0, and only matrices"):
        check_models(EngineConfig(model=str(path)))


@pytest.mark.parametrize(("name", "number"), [("Q1_0", 41), ("Q2_0", 42), ("Q8_K", 15)])
def test_a_type_without_meaning_here_is_refused_by_its_name(name: str, number: int, tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", "dense", "F32")
    data, stored = path.read_bytes(), b"blk.1.ffn_down.weight"
    place = data.index(stored) + len(stored) + 4 + 16
    path.write_bytes(data[:place] + number.to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(ConfigError) as caught:
        check_models(EngineConfig(model=str(path)))
    said = str(caught.value).splitlines()
    assert said[0] == f"model.layers.1.mlp.down_proj.weight is stored as {name}, which is not supported"
    assert all(kind in said[1] for kind in BLOCK_FORMATS.keys() - OWN_FORMATS.keys()) and len(said) == 3


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (3, "last")])
def test_an_embedding_model_makes_embeddings_as_its_file_says(
    number: int, pooling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = random_models.KINDS["dense"]
    sizes = {**kind.sizes, "pooling_type": number}
    monkeypatch.setitem(random_models.KINDS, "dense", replace(kind, sizes=sizes))
    with running(write_random(tmp_path / "m.gguf", "dense", "Q8_0", is_tied=True)) as engine:
        assert engine.info.embedding == pooling
        (vector,) = pooled(engine, [[1, 2, 3, 4]], pooling)
        assert vector.shape == (engine.info.embedding_size,) and bool(vector.any())
        with pytest.raises(UnsupportedError, match="makes embeddings"):
            engine.add(EngineRequest(request_id="text", prompt_token_ids=[1, 2], params=SamplingParams(), seed=0))
