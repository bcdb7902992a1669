"""Every kernel, compiled for NVIDIA's GPUs and emulated: the tests of the interpreted kernels, in other processes.

Kernels that are interpreted cannot be compiled, so tests/conftest.py decides for a process: PAGEWICK_EMULATE_PTX names
the target. By default a few tests of each module run; with PAGEWICK_DEEP=1 all of them, for all targets.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.deep import IS_DEEP

HERE = Path(__file__).parent
PROGRAMS, VARIANTS = "ptx/emulated_programs.py", "ptx/emulated_variants.py"
BATCH_INVARIANCE = "test_batch_invariance.py"
# Not for sm_80, which has no such products.
FP8_PRODUCTS = "test_fp8_products.py"
# Some tests of each file: every kind of kernel, and every promise of equal bits.
SM_80 = {
    PROGRAMS: [""],
    VARIANTS: [
        "test_attention[torch.bfloat16-128]",
        "test_scores_of_index_keys[torch.bfloat16-33]",
        "test_threads_agree_on_the_scale_of_a_row[fp8_e4m3-(512, 64)]",
        "test_window_attention[torch.bfloat16-selected-17]",
    ],
    "test_attention.py": [
        "test_numbers_of_8_bits[dtype0-int8]",
        "test_numbers_of_4_bits[heads1-80-options1]",
    ],
    "test_blocks.py": ["test_blocks_of_all_layers_are_gathered_and_scattered[[5, 0, 3]-24592]"],
    "test_chunks.py": ["test_a_prompt[130-scan]"],
    "test_compress.py": ["test_entries_have_the_same_bits_however_prompts_are_cut[True-5]"],
    "test_delta.py": ["test_a_sequence_has_the_same_bits_alone_and_in_chunks"],
    "test_edits.py": ["test_edits_have_the_bits_of_their_definition"],
    "test_elementwise.py": ["test_activations[gelu_tanh-dtype2]"],
    "test_full_attention.py": ["test_a_sequence_has_the_bits_that_it_has_alone[torch.bfloat16-80]"],
    "test_hyper.py": ["test_a_token_has_the_bits_that_it_has_alone"],
    "test_index.py": [
        "test_the_choice_is_that_of_a_stable_sort[100]",
        "test_stored_keys_are_those_of_the_definition[dtype2-False]",
    ],
    "test_latents.py": ["test_numbers_of_8_bits[fp8_e4m3]"],
    "test_logits.py": ["test_argmax_is_exact", "test_random_numbers_have_the_same_bits"],
    "test_mla.py": ["test_a_ragged_batch[dtype1]"],
    "test_moe.py": ["test_quantized_experts[9-Q4_K]"],
    "test_norm.py": ["test_rows_of_a_wider_matrix_have_the_bits_that_they_have_alone"],
    "test_quantized.py": ["test_tiles_of_many_rows[some-int4_g128]", "test_rows_are_the_exact_numbers[Q6_K]"],
    "test_rope.py": [
        "test_numbers_with_scales_are_those_of_the_definition[fp8_e5m2-constants0]",
        "test_some_heads_are_normed_and_others_are_not[k-rms_last-24]",
    ],
    "test_rotate_heads.py": ["test_rotated_heads[dtype2-72-72-False]"],
    "test_routing.py": [
        "test_routes[72-rule3-True]",
        "test_routes_among_experts_near_each_other[16-0.6]",
        "test_logits_of_root_scores[40-False]",
        "test_combine[dtype2]",
    ],
    "test_sampling.py": ["test_ties_masked_tokens_and_extreme_numbers"],
    "test_scan.py": [
        "test_a_ragged_batch[dtype1]",
        "test_a_ragged_batch_of_short_convolutions[dtype1]",
        "test_chunks_of_channels_that_forget_everything_and_nothing",
        "test_a_sequence_has_the_same_bits_alone_and_in_chunks[True]",
    ],
    "test_selected_blocks.py": ["test_attention_to_blocks[dtype1-5-1]", "test_selected_blocks[dtype1-2]"],
    "test_window_attention.py": ["test_a_sequence_has_the_same_bits_in_any_company_and_with_memory_for_few_splits"],
}
# Products of other tiles than those of sm_80: on sm_90 most of them are of warpgroups.
SM_90 = {
    PROGRAMS: ["test_products_of_matrices"],
    VARIANTS: [
        "test_long_prompts[torch.bfloat16-fp8_e4m3-64]",
        "test_scores_of_index_keys[torch.bfloat16-33]",
        "test_products_of_experts[plain-torch.bfloat16-some]",
    ],
    "test_attention.py": ["test_a_ragged_batch[dtype2]"],
    "test_chunks.py": ["test_a_prompt[130-delta]", "test_a_prompt[130-channel_delta]"],
    "test_delta.py": ["test_a_ragged_batch[dtype1]"],
    "test_full_attention.py": [
        "test_each_row_sees_all_rows_of_its_sequence[torch.bfloat16-72]",
    ],
    FP8_PRODUCTS: ["test_tiles[many-131-7-out_dtype1]"],
    "test_mla.py": ["test_a_ragged_batch[dtype1]"],
    "test_quantized.py": ["test_tiles_of_many_rows[many-Q6_K]"],
    BATCH_INVARIANCE: ["test_a_row_has_the_same_bits_in_every_batch[linear in float16]"],
}
SM_89 = {
    "test_attention.py": ["test_a_ragged_batch[dtype2]"],
    FP8_PRODUCTS: [
        "test_tiles[some-67-65-out_dtype0]",
        "test_activations_have_the_bits_of_their_definition[384-128-dtype1]",
    ],
    "test_mla.py": ["test_a_ragged_batch[dtype1]"],
}
SAMPLES = {"sm_80": SM_80, "sm_89": SM_89, "sm_90": SM_90}
FILES = {
    target: tuple({**sample, **dict.fromkeys((*SM_80, BATCH_INVARIANCE))}) if IS_DEEP else tuple(sample)
    for target, sample in SAMPLES.items()
}
# Files whose tests launch no kernels, or run whole models.
OTHER_FILES = {
    "test_backend.py", "test_fallback.py", "test_launches.py", "test_models.py", "test_on_gpu.py", "test_resources.py",
}  # fmt: skip
# Tests whose subject the emulator is not; they would only pass again.
ELSEWHERE = ("packing", "refused", "unsupported", "other_calls", "definition_itself", "experts_in_host_memory")


@functools.cache
def outcomes(target: str) -> dict[str, list[str]]:
    """Return for each file of tests a line for each test: "passed", or the message of its failure."""
    sample = SAMPLES[target]
    tests = [f"{HERE.parent / file}{'::' if name else ''}{name}" for file in sample for name in sample[file]]
    options = []
    if IS_DEEP:
        tests = [str(HERE.parent / file) for file in FILES[target]]
        options = ["-k", " and ".join(f"not {name}" for name in ELSEWHERE), "-o", "timeout=3600"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        environment |= {"PAGEWICK_EMULATE_PTX": target, "TRITON_CACHE_DIR": f"{folder}/cache"}
        done = subprocess.run([*command, *tests], capture_output=True, text=True, env=environment)
        assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
        return _read(report)


def _read(report: Path) -> dict[str, list[str]]:
    found = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure")
        failure = case.find("error") if failure is None else failure
        text = "passed" if failure is None else f"{case.get('name')}: {failure.get('message')}"
        found[str(case.get("classname")).rpartition(".")[2]].append(text)
    return found


@pytest.mark.timeout(36000 if IS_DEEP else 900)
@pytest.mark.parametrize(("target", "file"), [(target, file) for target, files in FILES.items() for file in files])
def test_compiled_kernels_pass_the_tests_of_interpreted_ones(target: str, file: str) -> None:
    found = outcomes(target)[Path(file).stem]
    assert found, "no test ran"
    assert [text for text in found if text != "passed"] == []


def test_every_file_of_kernels_has_its_sample() -> None:
    files = {path.name for path in HERE.parent.glob("test_*.py")}
    assert files - OTHER_FILES == {file for sample in SAMPLES.values() for file in sample} - {PROGRAMS, VARIANTS}
