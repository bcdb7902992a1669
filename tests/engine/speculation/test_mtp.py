"""Draft tokens from the model's own predicting layer are those of its definition, and change no token of a response."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewick.config import EngineConfig
from pagewick.engine.batch import SlotResult, SlotWork, StepPlan
from pagewick.engine.engine import Engine
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.messages import EngineRequest, EngineStats
from pagewick.engine.preflight import check_models
from pagewick.engine.sampling.step_results import StepResults
from pagewick.engine.speculation.drafting import SpeculationControl
from pagewick.engine.speculation.mtp import MtpProposals, _next_ids, _with_next
from pagewick.errors import ConfigError
from pagewick.models.mtp_offers import with_mtp
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.sampling_params import SamplingParams
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.opening import open_source
from tests.engine.graph.late_device import late_device
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import assert_same, request, running, serve
from tests.engine.speculation import test_speculative_engine as mixed
from tests.engine.test_image_requests import OPTIONS
from tests.engine.test_image_requests import requests as image_requests
from tests.models.checkpoints import write_checkpoint
from tests.models.predicting import EXAONE, LONGCAT, MELLUM, NEMOTRON, QWEN, Predicting
from tests.weights.gguf import predicting_models
from tests.weights.gguf.models import FILES, VOCAB_SIZE

KINDS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {},
    "glm-4.5": {},
    "glm-4.7-flash": {},
    "glm-5.2": {},
    "hy3": {"norm": "final_layernorm"},
    "k-exaone": {
        "layout": EXAONE,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * 3],
    },
    "ling-3-flash": {
        "norm": "final_layernorm",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
    },
    "longcat-flash": {"layout": LONGCAT},
    "mellum-2": {"layout": MELLUM},
    "nemotron-3-latents": {"layout": NEMOTRON},
    "qwen3-next": {"is_like_qwen": True, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}
RANKS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "block_size": 8, "num_kv_blocks": 60}
# Logits in float32 may differ by this.
TOLERANCE = 2e-4
PROMPT = list(range(5, 42))


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Predicting, str]:
    directory = tmp_path_factory.mktemp("model")
    made = Predicting(request.param, **KINDS[request.param])
    made.write(directory)
    return made, str(directory)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("glm")
    Predicting("glm-4.5").write(directory)
    return str(directory)


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, list[int]]]]:
    """Draft tokens after each step, with the number of tokens before them; no sequence pauses."""
    found: list[tuple[int, list[int]]] = []
    add_to = MtpProposals.add_to

    def noted(self: MtpProposals, results: StepResults, plan: StepPlan, batch: HostBatch, hidden: torch.Tensor) -> None:
        add_to(self, results, plan, batch, hidden)
        for work, result in zip(plan.work, results.get(), strict=True):
            end = work.start + work.num_tokens - work.num_draft_tokens + len(result.token_ids)
            found.append((end, list(result.draft_token_ids)))

    monkeypatch.setattr(MtpProposals, "add_to", noted)
    monkeypatch.setattr(SpeculationControl, "_pause", lambda self: None)
    yield found


def engine_of(directory: str, **options: Any) -> Engine:
    defaults = {"num_kv_blocks": 60, "block_size": 8, "max_model_len": 128, "speculative_method": "mtp"}
    return Engine(
        EngineConfig(model=directory, dtype="float32", device="cpu", num_threads=1, **{**defaults, **options})
    )


def run(engine: Engine, prompt: list[int], max_tokens: int = 14) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(EngineRequest(request_id=str(prompt), prompt_token_ids=prompt, params=params, seed=1))
    token_ids = []
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            token_ids += delta.token_ids
    assert engine.check_integrity() == []
    return token_ids


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_draft_tokens_are_those_of_the_definition(
    model: tuple[Predicting, str], proposed: list[tuple[int, list[int]]], num_tokens: int
) -> None:
    """Also after a prefix that the cache had, and where a prompt comes in parts."""
    oracle, directory = model
    engine = engine_of(directory, num_speculative_tokens=num_tokens, max_num_batched_tokens=13)
    try:
        first = run(engine, PROMPT)
        compare(oracle, [*PROMPT, *first], proposed, at_least=6 * num_tokens)
        proposed.clear()
        longer = [*PROMPT, *first[:4], 7, 3]
        second = run(engine, longer)
        compare(oracle, [*longer, *second], proposed, at_least=6 * num_tokens)
        # States become snapshots at multiples of 32 tokens.
        assert engine.stats().prefix_cache_hits == (32 if oracle.has_states else 40)
    finally:
        engine.close()


def compare(oracle: Predicting, token_ids: list[int], proposed: list[tuple[int, list[int]]], at_least: int) -> None:
    assert sum(len(drafts) for _, drafts in proposed) >= at_least
    for end, drafts in proposed:
        for place, draft in enumerate(drafts):
            logits = oracle.logits(token_ids[:end], drafts[:place])
            assert logits[draft] >= logits.max() - TOLERANCE, (end, drafts)
            assert logits.max() - logits.median() > 100 * TOLERANCE


def test_draft_tokens_that_are_all_right_up_to_the_longest_context(glm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prediction is made at places behind it."""
    draw = MtpProposals._draw

    def draw_right(self: MtpProposals, chains: Any, predicted: torch.Tensor) -> None:
        draw(self, chains, predicted)
        for chain in chains:
            chain.result.draft_token_ids[-1] = ([*PROMPT, *wanted] + [0] * 20)[chain.place + 1]

    engine = engine_of(glm, speculative_method="none", max_model_len=64)
    wanted = run(engine, PROMPT, 64 - len(PROMPT))
    engine.close()
    monkeypatch.setattr(MtpProposals, "_draw", draw_right)
    engine = engine_of(glm, max_model_len=64)
    try:
        # They end at other places within the last step.
        for num_known in range(6):
            prompt = [*PROMPT, *wanted[:num_known]]
            assert run(engine, prompt, 64 - len(prompt)) == wanted[num_known:]
        assert engine.stats().num_accepted_tokens > 60
    finally:
        engine.close()


@pytest.fixture(scope="module")
def without(glm: str) -> mixed.Answers:
    answers, _ = mixed.serve(glm)
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 4, "max_num_batched_tokens": 20},
        # Sequences are preempted, and there is not always room for draft tokens.
        {"num_speculative_tokens": 3, "num_kv_blocks": 22},
        # The first steps have nine sequences.
        {"num_speculative_tokens": 3, "speculative_max_batch": 8},
    ],
)
def test_tokens_are_those_without_draft_tokens(glm: str, without: mixed.Answers, options: dict[str, Any]) -> None:
    found, stats = mixed.serve(glm, speculative_method="mtp", **options)
    mixed.assert_equal(found, without)
    assert stats.num_draft_tokens > 8


@pytest.fixture(scope="module")
def foreseeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose next token depends on the last one alone, with a layer that always predicts it."""
    directory = tmp_path_factory.mktemp("foreseeing")
    made = Predicting("glm-4.5")
    with torch.no_grad():
        for layer in made.whole.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            for name, parameter in layer.mlp.named_parameters():
                if "down_proj" in name:
                    parameter.zero_()
        made.fc.weight.zero_()
        made.fc.weight[:, : len(made.fc.weight)] = torch.eye(len(made.fc.weight))
        made.embedding_norm.weight.fill_(1.0)
        made.norm.weight.copy_(made.base.norm.weight)
    made.write(directory)
    return str(directory)


@pytest.mark.parametrize(("num_tokens", "temperature"), [(1, 0.0), (3, 0.0), (4, 0.9)])
def test_a_layer_that_is_always_right(foreseeing: str, num_tokens: int, temperature: float) -> None:
    """All draft tokens are accepted, whether the most likely token is taken or one is drawn."""
    engine = engine_of(foreseeing, num_speculative_tokens=num_tokens)
    params = SamplingParams(temperature=temperature, max_tokens=61, ignore_eos=True)
    engine.add(EngineRequest(request_id="1", prompt_token_ids=PROMPT, params=params, seed=3))
    num_steps = 0
    try:
        while engine.has_work:
            assert all(delta.error is None for delta in engine.step())
            num_steps += 1
        stats: EngineStats = engine.stats()
    finally:
        engine.close()
    assert stats.num_draft_tokens >= 60 * num_tokens // (num_tokens + 1) - num_tokens
    # A token is drawn by sums of probabilities, in which the two differ by rounding.
    assert stats.num_accepted_tokens >= (0.85 if temperature else 1.0) * stats.num_draft_tokens
    assert num_steps <= 60 // (num_tokens + 1) + (6 if temperature else 1)


def test_the_table_of_tensors_is_that_of_the_file(model: tuple[Predicting, str]) -> None:
    directory = Path(model[1])
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}
    config = with_mtp(read_config(json.loads((directory / "config.json").read_text())), list(shapes))
    table = {tensor.name: tensor.shape for tensor in model_tensors(config, list(shapes))}
    assert table.items() <= shapes.items()
    # Copies, and weights of LongCat's experts that return their input.
    spare = re.compile(r".*(shared_head\.head|\d\.embed_tokens)\.weight|.*\.mlp\.experts\.([7-9]|1[01])\..*")
    assert [name for name in shapes.keys() - table.keys() if not spare.fullmatch(name)] == []


def test_two_ranks(foreseeing: str) -> None:
    options = {"num_speculative_tokens": 3}
    with running(Path(foreseeing), tensor_parallel_size=2, speculative_method="mtp", **RANKS, **options) as engine:
        found = serve(engine, [request(PROMPT, "r", max_tokens=30, ignore_eos=True)])
        stats = engine.stats()
    with running(Path(foreseeing), **RANKS) as engine:
        assert found == serve(engine, [request(PROMPT, "r", max_tokens=30, ignore_eos=True)])
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 15


def test_a_device_that_computes_late(glm: str) -> None:
    """As a GPU does: the layer reads the hidden states of a step before the next one overwrites them."""
    options = {"num_speculative_tokens": 3, "speculative_max_batch": 32, "max_steps_in_flight": 2, **RANKS}
    wanted = [request(range(3 + number, 30 + number), f"r{number}", max_tokens=12) for number in range(3)]
    with row_by_row():
        with running(Path(glm), **RANKS) as engine:
            expected = serve(engine, wanted)
        with late_device(chance=0.2), running(Path(glm), speculative_method="mtp", **options) as engine:
            assert_same(serve(engine, wanted), expected)
            assert engine.stats().num_draft_tokens > 8


def test_images(tmp_path: Path) -> None:
    """The layer also gets the embeddings of parts of images."""
    write_checkpoint("glm-4.5v", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    idx = text["num_hidden_layers"] - 1
    text |= {"num_hidden_layers": idx, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors, size = load_file(tmp_path / "model.safetensors"), text["hidden_size"]
    path = f"model.language_model.layers.{idx}"
    assert f"{path}.self_attn.o_proj.weight" in tensors
    tensors |= {f"{path}.{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{path}.eh_proj.weight"] = torch.randn(size, 2 * size) / size
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with running(tmp_path, **OPTIONS) as engine:
        expected = serve(engine, image_requests())
    with running(tmp_path, **OPTIONS, speculative_method="mtp", max_num_batched_tokens=64) as engine:
        assert_same(serve(engine, image_requests()), expected)
        assert engine.stats().num_draft_tokens > 8


def test_embeddings_move_one_token_ahead() -> None:
    """Within each sequence. The token after a sequence's last one has an embedding of its own."""
    rows = torch.arange(5.0).unsqueeze(1)
    batch = HostBatch(
        input_ids=np.arange(5), positions=np.arange(5)[np.newaxis], cu_seqlens_q=np.array([0, 3, 5], np.int32),
        context_lens=np.array([3, 2], np.int32), slot_mappings=[], block_tables=[], inputs_embeds=rows,
        embeds_mask=np.array([True, False, True, True, True]),
    )  # fmt: skip
    moved = _with_next(batch, [11, 12, 13, 14, 15])
    assert moved.input_ids.tolist() == [11, 12, 13, 14, 15]
    assert moved.embeds_mask is not None and moved.inputs_embeds is not None
    assert moved.embeds_mask.tolist() == [False, True, False, True, False]
    assert moved.inputs_embeds[moved.embeds_mask].flatten().tolist() == [2.0, 4.0]
    assert batch.embeds_mask is not None and batch.embeds_mask.tolist() == [True, False, True, True, True]


@pytest.mark.parametrize(
    ("work", "token_ids", "expected"),
    [
        # The first part of a prompt, its last part, a step of decoding, one with two draft tokens of three accepted.
        ({"num_tokens": 3, "token_ids": [4, 5, 6], "is_sampled": False, "next_token_id": 7}, [], [5, 6, 7]),
        ({"num_tokens": 2, "token_ids": [4, 5], "is_sampled": True}, [9], [5, 9]),
        ({"num_tokens": 1, "token_ids": None, "is_sampled": True}, [9], [9]),
        (
            {"num_tokens": 4, "token_ids": [4, 5, 6, 7], "is_sampled": True, "num_draft_tokens": 3},
            [5, 6, 9],
            [5, 6, 9, 0],
        ),
        # Two tokens that are computed again, before a draft token.
        ({"num_tokens": 4, "token_ids": [3, 4, 5, 6], "is_sampled": True, "num_draft_tokens": 1}, [8], [4, 5, 8, 0]),
        # The end of a prompt that is only embedded, and a sequence that has failed.
        ({"num_tokens": 2, "token_ids": [4, 5], "is_sampled": False}, [], [5, 0]),
        ({"num_tokens": 1, "token_ids": [4], "is_sampled": True}, [], [0]),
    ],
)
def test_the_tokens_after_those_of_a_work(work: dict[str, Any], token_ids: list[int], expected: list[int]) -> None:
    made = SlotWork(slot=0, start=0, new_block_ids=[], **work)
    assert _next_ids(made, SlotResult(token_ids=token_ids)) == expected


def test_a_model_without_such_a_layer(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layer that predicts further tokens"):
        engine_of(str(tmp_path))


def test_files_without_the_layer(glm: str, tmp_path: Path) -> None:
    """As transformers writes them."""
    (tmp_path / "config.json").write_text((Path(glm) / "config.json").read_text())
    tensors = load_file(Path(glm) / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.3.")}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", speculative_method="mtp")
    for start in (Engine, check_models):
        with pytest.raises(ConfigError, match=r"lack the layer .*model\.layers\.3\.eh_proj\.weight"):
            start(config)
    Engine(EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", num_kv_blocks=9)).close()


@pytest.mark.parametrize("name", ["glm-4.5", "k-exaone", "ling-3-flash", "nemotron-3-latents"])
def test_gguf_files(name: str, proposed: list[tuple[int, list[int]]], tmp_path: Path) -> None:
    """A file that llama.cpp's converter has written, with the names that it gives to the layer."""
    path = tmp_path / "model.gguf"
    path.write_bytes(lzma.decompress((FILES / f"mtp/{name}.gguf.xz").read_bytes()))
    prompt = [token_id % VOCAB_SIZE for token_id in PROMPT]
    engine = engine_of(str(path), num_speculative_tokens=3)
    try:
        found = run(engine, prompt)
    finally:
        engine.close()
    compare(predicting_models.original(name), [*prompt, *found], proposed, at_least=18)
    without = engine_of(str(path), speculative_method="none")
    assert run(without, prompt) == found
    without.close()


def test_names_in_gguf_files_of_qwen(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(lzma.decompress((FILES / "mtp/qwen3-next.gguf.xz").read_bytes()))
    original = predicting_models.original("qwen3-next")
    with open_source(path) as source:
        for name in ("fc", "embedding_norm", "hidden_norm", "norm"):
            stored = source.get(f"{QWEN[name]}.weight")
            torch.testing.assert_close(stored, getattr(original, name).weight.data, rtol=0, atol=0)
        queries = original.layer.layers[0].self_attn.q_proj.weight.data
        assert torch.equal(source.get("mtp.layers.0.self_attn.q_proj.weight"), queries)
    assert with_mtp(read_config(open_gguf(path).config), [piece.name for piece in open_gguf(path).pieces]).has_mtp
