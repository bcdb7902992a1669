"""Encoders make the embeddings and the logits of labels that transformers makes: alone, in a batch, on two ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pagewick.config import EngineConfig
from pagewick.engine.admission import check_request
from pagewick.engine.messages import EngineRequest
from pagewick.engine.whole_parts import check_encoder_options, for_encoder
from pagewick.errors import ConfigError, ModelLoadError, UnsupportedError
from pagewick.layers.distance_bias import bucket_of
from pagewick.layers.label_head import ACTIVATIONS
from pagewick.models import reading
from pagewick.models.encoding import DENSE_ACTIVATIONS
from pagewick.models.registry import ARCHITECTURES, read_config
from pagewick.sampling_params import SamplingParams
from tests.log_lines import collected_lines
from tests.models.answers import make_prompts, running
from tests.models.checkpoints import write_checkpoint
from tests.models.encoders import ENCODERS, LABELLED, VOCAB_SIZE, hidden_states, make_encoder, write_encoder
from tests.models.pooled import pooled
from tests.models.test_tensor_table import check_rank

PROMPTS = make_prompts((1, 33, 7, 64, 40))
SEPARATOR = 5
LABELS = "ForSequenceClassification"


def vectors(states: Sequence[Tensor], pooling: str) -> list[Tensor]:
    places = {"cls": lambda each: each[0], "last": lambda each: each[-1]}
    return [places[pooling](each) if pooling in places else each.double().mean(0).float() for each in states]


def assert_near(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-4) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_are_the_pooled_output_of_transformers(name: str, tmp_path: Path) -> None:
    states = hidden_states(write_encoder(name, tmp_path), PROMPTS)
    # A step has room for less than a prompt, until the engine raises it.
    with running(tmp_path, max_num_batched_tokens=30) as engine:
        assert engine.info.embedding == "mean"
        for pooling in ("cls", "last", "mean"):
            together = pooled(engine, PROMPTS, pooling)
            alone = [
                pooled(engine, [prompt], pooling, cache_salt=str(index))[0] for index, prompt in enumerate(PROMPTS)
            ]
            assert_near(together, vectors(states, pooling))
            assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
        assert engine.stats().prefix_cache_hits == 0 and not engine.check_integrity()


@pytest.mark.parametrize("name", ["modernbert", "embedding-gemma"])
def test_windows_reach_as_far_ahead_as_back(name: str, tmp_path: Path) -> None:
    prompts = make_prompts((290, 131, 12, 13), VOCAB_SIZE)
    states = hidden_states(write_encoder(name, tmp_path), prompts)
    with running(tmp_path, block_size=16) as engine:
        assert_near(pooled(engine, prompts, "mean"), vectors(states, "mean"))
        assert_near(pooled(engine, prompts, "cls"), vectors(states, "cls"))


def test_distances_beyond_the_last_bucket_count(tmp_path: Path) -> None:
    prompts = make_prompts((190, 131, 17), VOCAB_SIZE)
    model: Any = write_encoder("mpnet", tmp_path)
    states = hidden_states(model, prompts)
    with running(tmp_path) as engine:
        assert_near(pooled(engine, prompts[2:], "mean"), vectors(states[2:], "mean"))
        assert_near(pooled(engine, prompts, "mean", cache_salt="longer"), vectors(states, "mean"))
    distances = torch.arange(-300, 301)
    assert torch.equal(bucket_of(distances, 32), model.encoder.relative_position_bucket(distances))


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet", "modernbert", "nomic-bert", "embedding-gemma"])
def test_ranks_have_the_same_embeddings(name: str, tmp_path: Path) -> None:
    entries = {"num_attention_heads": 4} if name == "modernbert" else {}
    states = hidden_states(write_encoder(name, tmp_path, **entries), PROMPTS)
    with running(tmp_path, tensor_parallel_size=2) as engine:
        assert_near(pooled(engine, PROMPTS, "mean"), vectors(states, "mean"))


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_embeddings_in_bfloat16_are_near(name: str, tmp_path: Path) -> None:
    states = hidden_states(write_encoder(name, tmp_path), PROMPTS)
    with running(tmp_path, dtype="bfloat16") as engine:
        for ours, theirs in zip(pooled(engine, PROMPTS, "mean"), vectors(states, "mean"), strict=True):
            assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 0.995


@pytest.mark.parametrize("task", ["ForMaskedLM", LABELS])
@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "distilbert", "modernbert"])
def test_a_file_with_a_head_holds_the_encoder_under_other_names(name: str, task: str, tmp_path: Path) -> None:
    model = write_encoder(name, tmp_path, task)
    states = hidden_states(model.base_model, PROMPTS)  # type: ignore[arg-type]
    config = tmp_path / "config.json"
    if task == LABELS:
        # A model that rates texts makes embeddings, too, for requests that ask for a pooling.
        assert read_config(json.loads(config.read_text())).labels is not None
    with running(tmp_path) as engine:
        assert_near(pooled(engine, PROMPTS, "cls"), vectors(states, "cls"))


def logits_of(model: nn.Module, prompts: Sequence[list[int]], **inputs: Sequence[list[int]]) -> list[Tensor]:
    with torch.no_grad():
        return [
            model(
                torch.tensor([prompt]), **{name: torch.tensor([each[index]]) for name, each in inputs.items()}
            ).logits[0]
            for index, prompt in enumerate(prompts)
        ]


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("name", LABELLED)
def test_labels_are_those_of_transformers(name: str, num_labels: int, tmp_path: Path) -> None:
    prompts = [[token_id for token_id in prompt if token_id != SEPARATOR] for prompt in PROMPTS]
    model = write_encoder(name, tmp_path, LABELS, num_labels=num_labels)
    with running(tmp_path, max_num_batched_tokens=30) as engine:
        assert engine.info.num_labels == num_labels and not engine.info.embedding
        together = pooled(engine, prompts, "score")
        alone = [pooled(engine, [one], "score", cache_salt=str(index))[0] for index, one in enumerate(prompts)]
    assert_near(together, logits_of(model, prompts))
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_labels_of_modernbert_may_be_those_of_the_mean(tmp_path: Path) -> None:
    entries = {"num_labels": 2, "classifier_pooling": "mean", "classifier_bias": True, "classifier_activation": "silu"}
    model = write_encoder("modernbert", tmp_path, LABELS, **entries)
    with running(tmp_path) as engine:
        assert_near(pooled(engine, PROMPTS, "score"), logits_of(model, PROMPTS))


def test_tokens_behind_the_first_separator_have_the_second_type(tmp_path: Path) -> None:
    prompts = [[2, 9, 8, SEPARATOR, 7, 11, 30, SEPARATOR], [2, SEPARATOR, 44, SEPARATOR], [2, 9, 8], [2, 9, SEPARATOR]]
    firsts = [4, 2, 3, 3]
    types = [[0] * first + [1] * (len(prompt) - first) for prompt, first in zip(prompts, firsts, strict=True)]
    model = write_encoder("bert", tmp_path, LABELS, num_labels=1)
    with running(tmp_path) as engine:
        pairs = pooled(engine, prompts, "score", separator_id=SEPARATOR)
        texts = pooled(engine, prompts, "score", cache_salt="alone")
    assert_near(pairs, logits_of(model, prompts, token_type_ids=types))
    assert_near(texts, logits_of(model, prompts))
    assert not torch.allclose(pairs[0], texts[0], atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3-tied-bias", "llama"])
def test_a_decoder_that_was_trained_as_an_encoder(name: str, tmp_path: Path) -> None:
    """With a tied head, and with one of its own, which has no effect."""
    model = write_checkpoint(name, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "is_causal": False}))
    made: Any = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    states = hidden_states(made, PROMPTS)
    causal = hidden_states(model.model, PROMPTS)  # type: ignore[arg-type]
    assert not torch.allclose(states[1][0], causal[1][0], atol=1e-2)
    with running(tmp_path) as engine:
        assert_near(pooled(engine, PROMPTS, "mean"), vectors(states, "mean"))


@pytest.mark.parametrize("name", ENCODERS)
def test_the_table_of_tensors_agrees_with_the_modules(name: str) -> None:
    for task in ("Model", LABELS) if name in LABELLED else ("Model",):
        model: Any = make_encoder(name, task)
        config = read_config({**model.config.to_dict(), "architectures": [type(model).__name__]})
        for num_ranks in (1, 2, 3):
            for rank in range(num_ranks if config.num_heads % num_ranks == 0 else 0):
                check_rank(config, rank, num_ranks)


def test_every_activation_that_an_entry_may_name_is_known() -> None:
    assert set(DENSE_ACTIVATIONS) <= set(ACTIVATIONS) and set(reading.ACTIVATIONS.values()) <= set(ACTIVATIONS)


def test_every_encoder_in_the_table_has_a_variant() -> None:
    known = {variant.model or f"{variant.kind}Model" for variant in ENCODERS.values()}
    assert known == {name for name in ARCHITECTURES if name.endswith("Model")}


def test_requests_for_text_are_refused(tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    with running(tmp_path) as engine, pytest.raises(UnsupportedError, match="makes embeddings and writes no text"):
        check_request(EngineRequest(request_id="x", prompt_token_ids=[1], params=SamplingParams(), seed=0), engine.info)


def test_a_cache_of_prefixes_on_disk_is_refused(tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    with pytest.raises(ConfigError, match="--kv-cache-disk"), running(tmp_path, kv_cache_disk=str(tmp_path / "disk")):
        pass


@pytest.mark.parametrize("given", ["1GiB", 4])
def test_memory_for_blocks_that_are_kept_is_refused(given: Any, tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    with pytest.raises(ConfigError, match=r"--swap-space keeps.*\n  leave it out"), running(tmp_path, swap_space=given):
        pass
    with running(tmp_path, swap_space=0):
        pass


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "prefix caching"),
        ({"enable_prefix_caching": False}, None),
        ({"device": "cuda:0"}, "prefix caching and CUDA graphs"),
        ({"device": "cuda:0", "enforce_eager": True}, "prefix caching"),
        ({"device": "cuda:0", "enable_prefix_caching": False, "enforce_eager": True}, None),
    ],
)
def test_the_log_names_what_an_encoder_does_without(options: dict[str, Any], named: str | None) -> None:
    model = read_config({**PUBLISHED_NOMIC, "n_positions": 128})
    with collected_lines(logging.INFO) as lines:
        found = for_encoder(EngineConfig(**options), model)
        for_encoder(EngineConfig(**options), model, is_first=False)
    assert (found.enable_prefix_caching, found.swap_space, found.enforce_eager) == (False, 0, True)
    assert lines == ([] if named is None else [f"this model has no use for {named}: its tokens see those behind them"])


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--speculative-method", {"speculative_method": "ngram"}),
        ("--speculative-model", {"speculative_model": "draft"}),
    ],
)
def test_draft_tokens_are_refused(flag: str, given: dict[str, Any]) -> None:
    model = read_config({**PUBLISHED_NOMIC, "n_positions": 128})
    with pytest.raises(ConfigError, match=f"{flag} makes texts faster.*is an encoder\n  leave it out"):
        check_encoder_options(EngineConfig(**given), model)


def test_adapters_are_refused(tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    with pytest.raises(ConfigError, match="LoRA adapters of BertModel"), running(tmp_path, enable_lora=True):
        pass


@pytest.mark.parametrize("quantization", ["q8_0"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_weights_are_quantized_at_load(name: str, quantization: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    states = hidden_states(write_encoder(name, tmp_path, **sizes), PROMPTS)
    with running(tmp_path, quantization=quantization) as engine:
        assert quantization.split("_")[0] in engine.info.weights.lower()
        for ours, theirs in zip(pooled(engine, PROMPTS, "mean"), vectors(states, "mean"), strict=True):
            assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 0.98


def test_an_encoder_is_no_draft_model(tmp_path: Path) -> None:
    write_encoder("bert", tmp_path / "draft")
    write_checkpoint("llama", tmp_path / "target")
    options = {"speculative_model": str(tmp_path / "draft")}
    with pytest.raises(ConfigError, match="encoders write no text"), running(tmp_path / "target", **options):
        pass


def test_heads_of_other_tasks_are_left_out(tmp_path: Path) -> None:
    model: Any = write_encoder("bert", tmp_path)
    file = tmp_path / "model.safetensors"
    heads = {
        "qa_outputs.weight": torch.ones(2, 48),
        "colbert_linear.bias": torch.ones(3),
        "classifier.weight": torch.ones(2, 48),
    }
    save_file({**load_file(file), **heads}, file)
    with running(tmp_path) as engine:
        assert_near(pooled(engine, PROMPTS, "cls"), vectors(hidden_states(model, PROMPTS), "cls"))


PUBLISHED_NOMIC = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu", "n_embd": 768,
    "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192, "layer_norm_epsilon": 1e-12, "prenorm": False,
    "mlp_fc1_bias": False, "mlp_fc2_bias": False, "qkv_proj_bias": False, "parallel_block": False, "causal": False,
    "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "use_rms_norm": False,
    "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 2, "vocab_size": 30528,
}  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "context"),
    [
        ({"max_trained_positions": 2048}, 2048),
        ({"max_position_embeddings": 8192}, 2048),
        ({"rotary_scaling_factor": 2}, 2048),
        ({"max_trained_positions": 512}, 512),
    ],
)
def test_published_files_of_nomic_bert(entries: dict[str, Any], context: int) -> None:
    """Nomic's own names of entries. The rotary embedding is only scaled beyond the length of the training."""
    config = read_config({**PUBLISHED_NOMIC, **entries})
    assert (config.max_position_embeddings, config.longest_context) == (context, context)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.vocab_size) == (768, 12, 12, 30528)
    rope = config.layers[0].rope
    assert rope is not None and (rope.theta, rope.kind, rope.rotary_dim) == (1000.0, "default", 64)


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings"),
        ("modernbert", {"classifier_pooling": "max", "architectures": [f"ModernBert{LABELS}"]}, "classifier_pooling"),
        ("nomic-bert", {"prenorm": True}, "prenorm"),
        ("nomic-bert", {"num_experts": 8}, "num_experts"),
        ("embedding-gemma", {"use_bidirectional_attention": False}, "use_bidirectional_attention"),
        ("bert", {"embedding_pooling": "max"}, "embedding_pooling"),
        ("bert", {"embedding_dense": "2_Dense"}, "embedding_dense"),
    ],
)  # fmt: skip
def test_what_would_change_the_model_is_refused(name: str, entries: dict[str, Any], message: str) -> None:
    model: Any = make_encoder(name)
    values = {**model.config.to_dict(), "architectures": [type(model).__name__], **entries}
    with pytest.raises(ModelLoadError, match=message):
        read_config(values)


@pytest.mark.parametrize(
    ("entries", "dtype"),
    [
        ({}, "float32"), ({"dtype": None}, "float32"), ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
    ],
)  # fmt: skip
def test_old_files_hold_float32(entries: dict[str, Any], dtype: str) -> None:
    for name in ("bert", "modernbert"):
        config: Any = make_encoder(name).config
        values = {key: value for key, value in config.to_dict().items() if key != "dtype"}
        found = read_config({**values, "architectures": [f"{ENCODERS[name].kind}Model"], **entries})
        assert found.dtype == dtype
