"""Plans for machines that are not here, compared with sums by hand, with counting, and with the engine's own parts."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from pagewick.doctor import model as model_module
from pagewick.doctor.checkpoint import Checkpoint, open_checkpoint
from pagewick.doctor.clusters import Cluster, GpuKind, parse_cluster
from pagewick.doctor.model import ModelReport, describe
from pagewick.doctor.plan import Wishes
from pagewick.doctor.rank_weights import RankWeights, weights_of_rank
from pagewick.doctor.report import headline, model_json, model_text
from pagewick.doctor.scale import ScalePlan, least_offload, plan_scale
from pagewick.doctor.stored import described_tensors
from pagewick.doctor.support import Verdict
from pagewick.errors import ConfigError
from pagewick.layers.expert_offload import Residency
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config

DATA = Path(__file__).parent / "data"
GIB = 2**30
# Rates that make every sum easy: 1000 bytes a second from memory, 100 to the host, 10 to others, 1 to other nodes.
SLOW = GpuKind("Slow", 4 * GIB, 1000, 100, 10, 1)
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 40,
    "max_position_embeddings": 64, "num_local_experts": 6, "num_experts_per_tok": 2, "torch_dtype": "float32",
}  # fmt: skip


def checkpoint_of(**changes: Any) -> Checkpoint:
    config = {**MIXTRAL, **changes}
    model = read_config(config)
    tensors = tuple(described_tensors(model, config))
    return Checkpoint("m", "m", config, model, Verdict(True), tensors, is_only_described=True)


def weights_of(num_ranks: int, dtype: str | None = None, **changes: Any) -> RankWeights:
    return weights_of_rank(read_config({**MIXTRAL, **changes}), checkpoint_of(**changes), num_ranks, dtype)


def plan_of(
    *, gpus: int = 1, nodes: int = 1, sequences: int = 1, offload: int = 0, wishes: Wishes | None = None, **changes: Any
) -> ScalePlan:
    cluster, checkpoint = Cluster(SLOW, gpus, nodes), checkpoint_of(**changes)
    wishes = replace(wishes or Wishes(), max_num_seqs=sequences)
    return plan_scale(checkpoint, model_of(checkpoint), cluster, wishes, experts_per_rank=offload)


def model_of(checkpoint: Checkpoint) -> ModelConfig:
    assert checkpoint.model_config is not None
    return checkpoint.model_config


def bytes_of(plan: ScalePlan, index: int = 0) -> dict[str, int]:
    return {cost.name: cost.num_bytes for cost in plan.steps[index].costs}


EXPERT = 3 * 16 * 12 * 4
ATTENTION = (16 * 16 + 2 * 8 * 16 + 16 * 16) * 4
WHOLE = (2 * 16 + 6 * 16) * 4  # norms and router


class TestWeights:
    def test_of_one_rank(self) -> None:
        found = weights_of(1)
        assert found.expert == 3 * 6 * EXPERT
        assert found.dense == 3 * (ATTENTION + WHOLE) + 16 * 4
        assert (found.embedding, found.head, found.shared_expert) == (40 * 16 * 4, 40 * 16 * 4, 0)

    def test_of_several(self) -> None:
        found = weights_of(2)
        assert found.expert == 3 * 3 * EXPERT
        assert found.dense == 3 * (ATTENTION // 2 + WHOLE) + 16 * 4

    def test_more_ranks_than_kv_heads_store_some_twice(self) -> None:
        found = weights_of(4)
        attention = (16 * 16 // 4 + 2 * 8 * 16 // 2 + 16 * 16 // 4) * 4
        assert found.dense == 3 * (attention + WHOLE) + 16 * 4

    def test_in_another_dtype_routers_stay(self) -> None:
        found = weights_of(1, "bfloat16")
        assert found.expert == 3 * 6 * EXPERT // 2
        assert found.dense == 3 * (ATTENTION // 2 + 2 * 16 * 2 + 6 * 16 * 4) + 16 * 2

    def test_a_tied_head_is_read_from_the_embedding(self) -> None:
        found = weights_of(1, tie_word_embeddings=True)
        assert (found.head, found.read_head) == (0, found.embedding)

    def test_of_latent_attention(self) -> None:
        latent = {
            "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 6, "q_lora_rank": 10, "qk_nope_head_dim": 3,
            "qk_rope_head_dim": 2, "v_head_dim": 5, "n_routed_experts": 6, "n_shared_experts": 2,
            "moe_intermediate_size": 12, "first_k_dense_replace": 1, "num_hidden_layers": 2, "n_group": 2,
            "topk_group": 1,
        }  # fmt: skip
        one, two = (weights_of(ranks, **latent) for ranks in (1, 2))
        assert one.shared_expert == 2 * two.shared_expert == 2 * EXPERT
        # Every rank has these whole: norms, projections to low ranks, and the router with its corrections.
        whole = 4 * (2 * (2 * 16 + 6 + 10 + 16 * (10 + 6 + 2)) + 6 * 16 + 6 + 16)
        shared_out = 4 * (2 * (10 * 4 * 5 + 6 * 4 * 8 + 20 * 16) + 3 * 16 * 12)
        assert one.dense == whole + shared_out
        assert two.dense == whole + shared_out // 2


class TestSteps:
    def test_a_dense_model_by_hand(self) -> None:
        plan = plan_of(architectures=["MistralForCausalLM"], num_local_experts=0, wishes=Wishes(max_model_len=33))
        dense = 3 * (ATTENTION + 2 * 16 * 4 + EXPERT) + 16 * 4
        cache = 33 * 3 * 2 * 2 * 16 * 4  # a head of 4 takes 16, as the engine stores it
        assert bytes_of(plan) == {
            "attention, dense layers, norms": dense, "vocabulary head": 40 * 16 * 4, "KV cache": cache,
        }  # fmt: skip
        (step,) = plan.steps
        assert step.seconds == pytest.approx((dense + 40 * 16 * 4 + cache) / 1000)
        assert step.tokens_per_second == pytest.approx(1 / step.seconds)
        assert (plan.num_collectives, plan.num_experts) == (0, 0)

    def test_a_window_is_all_that_is_read(self) -> None:
        dense = {"architectures": ["MistralForCausalLM"], "num_local_experts": 0}
        whole, windowed = (plan_of(**dense, sliding_window=window) for window in (None, 7))
        assert bytes_of(windowed)["KV cache"] * 64 == bytes_of(whole)["KV cache"] * 7

    @pytest.mark.parametrize("sequences", [1, 2, 3])
    def test_experts_that_are_met_by_counting(self, sequences: int) -> None:
        choices = list(combinations(range(6), 2))
        met = [len(set().union(*chosen)) for chosen in product(choices, repeat=sequences)]
        step = plan_of(sequences=sequences).steps[-1]
        assert step.experts_met == pytest.approx(sum(met) / len(met))
        routed = {cost.name: cost.num_bytes for cost in step.costs}["routed experts"]
        assert routed == round(step.experts_met * 3 * EXPERT)

    @pytest.mark.parametrize(("sequences", "offload"), [(1, 2), (3, 2), (3, 4), (9, 3)])
    def test_copies_as_the_engine_makes_them(self, sequences: int, offload: int) -> None:
        """Also where more experts are met than there is room for."""
        step = plan_of(sequences=sequences, offload=offload).steps[-1]
        residency, generator = Residency(6, 6 - offload), random.Random(5)
        copies, num_steps = 0, 4000
        for _ in range(num_steps):
            needed = {expert for _ in range(sequences) for expert in generator.sample(range(6), 2)}
            copies += sum(len(residency.admit(wave)) for wave in residency.waves(needed))
        assert step.experts_copied == pytest.approx(copies / num_steps, rel=0.05)

    def test_a_copy_goes_both_ways(self) -> None:
        plan = plan_of(offload=2)
        assert plan.steps[0].experts_copied == pytest.approx(2 * 2 / 6)
        assert bytes_of(plan)["experts from and to the host"] == 2 * 3 * EXPERT * 2 * 2 // 6
        assert {cost.bandwidth for cost in plan.steps[0].costs} == {1000, 100}

    def test_what_ranks_send_by_hand(self) -> None:
        plan = plan_of(gpus=4, sequences=5)
        reduced = (2 * 3 + 1) * 5 * 16 * 4
        logits = 5 * 40 * 4
        assert bytes_of(plan, 1)["between GPUs"] == 2 * 3 * reduced / 4 + 3 * logits / 4
        assert "between nodes" not in bytes_of(plan, 1)
        assert plan.num_collectives == 2 * 3 + 1 + 1

    def test_what_nodes_send_by_hand(self) -> None:
        plan = plan_of(gpus=2, nodes=2)
        reduced, logits = 7 * 16 * 4, 40 * 4
        assert bytes_of(plan)["between GPUs"] == reduced + 2 * logits / 4
        assert bytes_of(plan)["between nodes"] == reduced / 2 + logits / 4
        alone = plan_of(gpus=1, nodes=4)
        assert bytes_of(alone)["between nodes"] == 2 * 3 * reduced / 4 + 3 * logits / 4
        assert "between GPUs" not in bytes_of(alone)


class TestMemory:
    def test_what_is_offloaded_leaves_the_device(self) -> None:
        all_here, some = plan_of(gpus=2), plan_of(gpus=2, offload=1)
        assert all_here.memory.weights - some.memory.weights == 2 * 3 * EXPERT // 2
        assert some.host == (2 + 1) * 3 * EXPERT // 2  # room for one more, through which two change places
        assert (some.num_offloaded, all_here.host) == (2, 0)

    def test_as_many_sequences_as_fit(self) -> None:
        plan = plan_of(sequences=10**9, wishes=Wishes(max_model_len=40))
        assert plan.memory.rows[-1].num_bytes == 2 * 32 * 3 * 2 * 2 * 16 * 4  # two blocks
        assert plan.num_fitting == plan.memory.kv_default // plan.memory.rows[-1].num_bytes
        memory = plan.memory
        assert memory.kv_default == int(4 * GIB * 0.9 - memory.weights - memory.runtime) - memory.activations
        assert [step.num_sequences for step in plan.steps] == [1, plan.num_fitting]
        assert plan.longest == 64

    def test_none_fits(self) -> None:
        config = json.loads((DATA / "DeepSeek-R1/config.json").read_text()) | {"num_hidden_layers": 5}
        checkpoint = checkpoint_of(**config)
        model, cluster, wishes = model_of(checkpoint), parse_cluster("8xH100:4GiB:1TB"), Wishes(max_model_len=100_000)
        plan = plan_scale(checkpoint, model, cluster, wishes)
        assert (plan.num_fitting, plan.steps) == (0, ())
        weights = weights_of_rank(model, checkpoint, 8)
        least = least_offload(model, weights, plan.memory)
        assert least is not None and least > 1
        fits = [
            plan_scale(checkpoint, model, cluster, wishes, experts_per_rank=number) for number in (least - 1, least)
        ]
        assert [plan.num_fitting > 0 for plan in fits] == [False, True]
        tiny = plan_scale(checkpoint, model, parse_cluster("8xL4:2GiB:300GB"), Wishes())
        assert least_offload(model, weights, tiny.memory) is None


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("3 GPUs do not divide the model's 4 attention heads; smaller: 1, 2", {"gpus": 3}),
        ("8 GPUs do not divide the model's 4 attention heads; smaller: 1, 2, 4", {"gpus": 8}),
        ("--tensor-parallel-size 2 is not the 1 GPUs", {"wishes": Wishes(tensor_parallel_size=2)}),
        ("--pipeline-parallel-size is planned for this machine", {"wishes": Wishes(pipeline_parallel_size=2)}),
        ("--max-model-len 65 is longer", {"wishes": Wishes(max_model_len=65)}),
        ("moves 6 of 6 experts to host memory, and 2 must stay.* give at most 2", {"gpus": 2, "offload": 3}),
        (
            "LlamaForCausalLM has no experts",
            {"offload": 1, "architectures": ["LlamaForCausalLM"], "num_local_experts": 0},
        ),
    ],
)
def test_mistakes(words: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_of(**arguments)


class TestDeepSeek:
    """The latent cache, and the published number of active parameters."""

    def test_the_cache(self) -> None:
        checkpoint = open_checkpoint(str(DATA / "DeepSeek-R1"), {})
        for gpus in ("1xB200:2TiB:8TB", "8xB200"):
            plan = plan_scale(checkpoint, model_of(checkpoint), parse_cluster(gpus), Wishes())
            assert plan.memory.kv_bytes_per_token == (512 + 64) * 61 * 2

    def test_37_billion_parameters_take_part(self, runs: None) -> None:
        checkpoint = open_checkpoint(str(DATA / "DeepSeek-R1"), {})
        report = describe(checkpoint, parse_cluster("8xH200"), Wishes())
        assert report.num_parameters == 671_026_419_200 and report.num_active is not None
        assert 36.5e9 < report.num_active < 37.5e9


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the engine ran every model."""
    monkeypatch.setattr(model_module, "verdict_of", lambda *given: Verdict(True))


class TestReports:
    def report(self, **arguments: Any) -> ModelReport:
        cluster = Cluster(arguments.pop("kind", SLOW), 2, arguments.pop("nodes", 1))
        return describe(checkpoint_of(), cluster, Wishes(max_num_seqs=arguments.pop("sequences", 5)), **arguments)

    def test_text(self, runs: None) -> None:
        text = model_text(self.report(nodes=2, experts_per_rank=1))
        for words in (
            "fits on 2 nodes of 2 x Slow; planned, not run\n",
            "2 nodes of 2 x Slow: 4.0 GiB at 1.0 kB/s; 100 B/s to the host, 10 B/s to other GPUs",
            "1 B/s to other nodes", "4 of 6 experts of each layer in host memory", "in each node",
            "sequences of 64 tokens, or one of 64", "tokens per second, at most", "of them in host memory",
            "Ranks exchange data 8 times in a step",
        ):  # fmt: skip
            assert words in text, (words, text)
        assert len(text.splitlines()) <= 30
        assert max(map(len, text.splitlines())) <= 130

    def test_json_has_the_same_numbers(self, runs: None) -> None:
        report = self.report(experts_per_rank=1)
        assert report.plan is not None and report.scale is not None
        found = json.loads(json.dumps(model_json(report)))
        assert (found["ok"], found["plan"]["weights"]) == (True, report.plan.weights)
        step = found["scale"]["steps"][1]
        assert step["tokens_per_second"] == report.scale.steps[1].tokens_per_second
        assert sum(cost["seconds"] for cost in step["costs"]) == pytest.approx(step["seconds"])
        assert found["scale"]["num_experts"] == 6

    def test_what_does_not_fit(self, runs: None) -> None:
        report = self.report(kind=GpuKind("Tiny", 2**28, 1000, 100, 10))
        assert re.fullmatch(
            r"does not fit on 2 x Tiny: 8\d\d MiB are needed on each GPU, and 256 MiB are free: \d+ MiB are missing",
            headline(report),
        )
        assert "tokens per second" not in model_text(report)

    def test_more_gpus_and_offload_are_tried_before_they_are_advised(self, runs: None) -> None:
        config = json.loads((DATA / "DeepSeek-R1/config.json").read_text()) | {"num_hidden_layers": 5}
        checkpoint, kind = checkpoint_of(**config), "xH100:4GiB:1TB"
        report = describe(checkpoint, parse_cluster(f"8{kind}"), Wishes())
        (found,) = report.problems
        offload, gpus = found.fix.removeprefix("use ").split("; or ")
        assert offload.startswith("--num-experts-offload-per-rank ") and gpus.endswith("such GPUs")
        number = int(offload.split()[1])
        offloaded = describe(checkpoint, parse_cluster(f"8{kind}"), Wishes(), experts_per_rank=number)
        larger = describe(checkpoint, parse_cluster(f"{gpus.split()[0]}{kind}"), Wishes())
        assert (offloaded.problems, larger.problems) == ([], [])

    def test_weights_that_fit_without_a_cache(self, runs: None) -> None:
        plan = self.report().plan
        assert plan is not None
        report = self.report(kind=GpuKind("Tight", plan.needed + 4000, 1000, 100, 10))
        assert "32 tokens take 12.0 KiB of KV cache on each GPU, and 3.9 KiB are left: 8.1 KiB" in headline(report)

    def test_a_sequence_too_long_names_the_length_that_fits(self, runs: None) -> None:
        checkpoint = checkpoint_of(max_position_embeddings=10**5)
        roomy = describe(checkpoint, Cluster(SLOW, 1), Wishes(max_model_len=10**5)).plan
        assert roomy is not None
        tight = Cluster(GpuKind("Tight", roomy.needed + 4 * roomy.rows[0].num_bytes, 1000, 100, 10), 1)
        (found,) = describe(checkpoint, tight, Wishes(max_model_len=10**5)).problems
        length = re.search(r"use --max-model-len (\d+)", found.fix)
        assert length is not None and 4 * 2048 <= int(length[1]) < 10**5
        assert describe(checkpoint, tight, Wishes(max_model_len=int(length[1]))).problems == []

    def test_fewer_sequences_are_advised_where_some_wait(self, runs: None) -> None:
        fitting = describe(checkpoint_of(), Cluster(SLOW, 2), Wishes()).scale
        assert fitting is not None
        report = self.report(sequences=fitting.num_fitting + 1)
        assert report.scale is not None
        number = report.scale.num_fitting
        assert number <= fitting.num_fitting, "a step of more sequences needs more memory"
        (found,) = report.findings
        assert (found.level, found.subject) == ("note", "sequences")
        assert found.text.startswith(f"{number:,} of {fitting.num_fitting + 1:,} fit at once")
        assert f"--max-num-seqs {number}," in found.fix
        assert self.report(sequences=number).findings == ()

    def test_a_model_that_does_not_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_module, "verdict_of", lambda *given: Verdict(False, "no", fix="use another"))
        report = self.report()
        (found,) = report.problems
        assert (found.text, found.fix) == ("no", "use another")
        assert headline(report) == "Pagewick does not run it; it fits on 2 x Slow"
        assert "tokens per second" in model_text(report)
