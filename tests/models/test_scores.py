"""Logits of labels, and of tokens in their place, are those of transformers: alone, in batches and chunks, on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pagewick.engine.admission import check_request
from pagewick.engine.messages import EngineRequest
from pagewick.errors import InvalidRequestError, ModelLoadError, UnsupportedError
from pagewick.models.labels import LabelHead
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.pooling_params import EMBEDDING
from pagewick.sampling_params import SamplingParams
from tests.models.answers import make_prompts, running
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.labelled import scored, write_labelled

# The second and the last begin alike, for longer than a block.
PROMPTS = make_prompts((1, 33, 7, 64))
PROMPTS.append([*PROMPTS[1][:32], 5, 9, 5])
TOKENS = [9, 150, 9, 0]


def of_labels(model: nn.Module, prompt: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].float()  # type: ignore[no-any-return]


def of_tokens(model: nn.Module, prompt: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, -1, TOKENS].float()  # type: ignore[no-any-return]


def check(directory: Path, expected: list[Tensor], label_ids: list[int], **options: Any) -> None:
    """Compare with the logits expected, and to the last bit between batches, chunks, and hits in the prefix cache."""
    with running(directory, **options) as engine:
        together = scored(engine, PROMPTS, label_ids)
        before = engine.stats().prefix_cache_hits
        again = scored(engine, PROMPTS, label_ids)
        assert engine.stats().prefix_cache_hits > before
        alone = [scored(engine, [prompt], label_ids, salt=f"{index}")[0] for index, prompt in enumerate(PROMPTS)]
    with running(directory, max_num_batched_tokens=7, **options) as engine:
        in_chunks = scored(engine, PROMPTS, label_ids)
    assert len({str(one.tolist()) for one in together}) == len(PROMPTS)
    for ours, theirs in zip(together, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for others in (again, alone, in_chunks):
        assert all(torch.equal(one, other) for one, other in zip(together, others, strict=True))


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied-bias", "gemma-2", "llama-bias-tied"])
def test_logits_of_labels_are_those_of_transformers(name: str, num_labels: int, tmp_path: Path) -> None:
    model = write_labelled(name, tmp_path, num_labels)
    check(tmp_path, [of_labels(model, prompt) for prompt in PROMPTS], [])


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied-bias", "gemma-2"])
def test_logits_of_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Gemma 2's are capped. A token may be named twice."""
    model = write_checkpoint(name, tmp_path)
    check(tmp_path, [of_tokens(model, prompt) for prompt in PROMPTS], TOKENS)


@pytest.mark.parametrize("label_ids", [[], TOKENS], ids=["labels", "tokens"])
def test_ranks_have_the_same_logits(label_ids: list[int], tmp_path: Path) -> None:
    if label_ids:
        model = write_checkpoint("qwen3", tmp_path)
        expected = [of_tokens(model, prompt) for prompt in PROMPTS]
    else:
        model = write_labelled("qwen3", tmp_path, 2)
        expected = [of_labels(model, prompt) for prompt in PROMPTS]
    with running(tmp_path, tensor_parallel_size=2, max_num_batched_tokens=50) as engine:
        found = scored(engine, PROMPTS, label_ids)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_head_is_not_quantized(tmp_path: Path) -> None:
    model = write_labelled("qwen3", tmp_path, 1, hidden_size=64, intermediate_size=96)
    expected = torch.stack([of_labels(model, prompt) for prompt in PROMPTS])
    with running(tmp_path, quantization="q8_0", quantized_cache=False) as engine:
        assert "q8_0" in engine.info.weights.lower()
        head = engine._ranks.runner.model.score
        assert head is not None and torch.equal(head(torch.eye(64)).T, model.state_dict()["score.weight"])
        found = torch.stack(scored(engine, PROMPTS))
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.3)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied-bias", "gemma-2"])
def test_the_table_of_tensors_has_the_head(name: str, tmp_path: Path) -> None:
    model = write_labelled(name, tmp_path, 3)
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    stored = {tensor: tuple(weight.shape) for tensor, weight in model.state_dict().items()}
    assert {tensor.name: tensor.shape for tensor in model_tensors(config, list(stored))} == stored


def request(**fields: Any) -> EngineRequest:
    return EngineRequest(request_id="x", prompt_token_ids=[1], seed=0, **{"params": EMBEDDING, **fields})


def test_requests_for_what_a_model_lacks_are_refused(tmp_path: Path) -> None:
    labelled, plain = tmp_path / "labelled", tmp_path / "plain"
    write_labelled("qwen3", labelled, 1)
    write_checkpoint("qwen3", plain)
    with running(labelled) as engine:
        info = engine.info
    assert (info.num_labels, info.label_activation, info.embedding) == (1, "sigmoid", "")
    with pytest.raises(UnsupportedError, match="rates texts and writes none; send POST /v1/rerank"):
        check_request(request(params=SamplingParams()), info)
    with pytest.raises(UnsupportedError, match="has labels of its own"):
        check_request(request(pooling="score", label_ids=[1]), info)
    check_request(request(pooling="last"), info)
    with running(plain) as engine:
        info = engine.info
    assert (info.num_labels, info.label_activation) == (0, "")
    with pytest.raises(UnsupportedError, match="has no labels"):
        check_request(request(pooling="score"), info)
    with pytest.raises(InvalidRequestError, match="token id 5000 is not in the vocabulary"):
        check_request(request(pooling="score", label_ids=[5000]), info)


SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("entries", "head"),
    [
        ({}, LabelHead(2, "")),
        ({"id2label": {"0": "relevance"}}, LabelHead(1, "sigmoid", names=("relevance",))),
        ({"num_labels": 1, "problem_type": "regression"}, LabelHead(1, "sigmoid", problem_type="regression")),
        (
            {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"},
            LabelHead(2, "", names=("a", "b"), problem_type="multi_label_classification"),
        ),
        ({"id2label": {"0": "a", "2": "b"}, "problem_type": None}, LabelHead(2, "")),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": IDENTITY}}, LabelHead(1, "none")),
        ({"num_labels": 1, "sentence_transformers": {"version": "5.0"}}, LabelHead(1, "sigmoid")),
        ({"num_labels": 1, "sbert_ce_default_activation_function": IDENTITY}, LabelHead(1, "none")),
        ({"num_labels": 1, "sbert_ce_default_activation_function": SIGMOID}, LabelHead(1, "sigmoid")),
        ({"num_labels": 5, "sentence_transformers": {"activation_fn": SIGMOID}}, LabelHead(5, "")),
    ],
    ids=str,
)
def test_the_entries_of_heads(entries: dict[str, Any], head: LabelHead) -> None:
    values = {**VARIANTS["qwen3"].all_entries(), "architectures": ["Qwen3ForSequenceClassification"], **entries}
    assert read_config(values).labels == head
    assert read_config({**values, "architectures": ["Qwen3ForCausalLM"]}).labels is None


@pytest.mark.parametrize("name", ["torch.nn.modules.activation.Tanh", "mine.Sigmoid", "Sigmoid"])
def test_other_activations_are_refused(name: str) -> None:
    values = {**VARIANTS["qwen3"].all_entries(), "architectures": ["Qwen3ForSequenceClassification"]}
    with pytest.raises(ModelLoadError, match=r"config\.json: sentence_transformers is .* and must be one with the"):
        read_config({**values, "num_labels": 1, "sentence_transformers": {"activation_fn": name}})


def test_another_problem_type_is_refused() -> None:
    values = {**VARIANTS["qwen3"].all_entries(), "architectures": ["Qwen3ForSequenceClassification"]}
    with pytest.raises(ModelLoadError, match=r"problem_type is 'ranking', and must be one of multi_label_class"):
        read_config({**values, "problem_type": "ranking"})


def test_a_head_of_another_size_than_the_config_says_is_refused(tmp_path: Path) -> None:
    write_labelled("qwen3", tmp_path, 1)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_labels": 3}))
    with pytest.raises(ModelLoadError, match=r"score\.weight.*shape"), running(tmp_path):
        pass
