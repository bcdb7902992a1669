"""Tensors of all experts of a layer in one, as some checkpoints have them, and the tensors of single experts in it.

The rest of the program knows a tensor for each projection of each expert. Imports no torch.

E: experts; N: outputs of a projection; C: its inputs. The projections to gate and up are one with 2 * I outputs, or two
with I outputs; experts without gates have one to up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.stack_kinds import DOWN, GATE, GATE_UP, SCALE, SCALE_INV, UP, Kind, kind_of, plain_leaf
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

_FIX: Final = "  config.json and the weights do not belong together; download or copy both again"
_BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class Stacking:
    """How the checkpoints of an architecture stack experts.

    owners: ends of names of the module that has them. num_experts, inner: entries of config.json with their number
    and with I. is_transposed: numbers are [E, C, N], else [E, N, C]; None: the shape says which. is_interleaved: gate
    and up have every other output, else gate has the first half. has_biases: there are biases [E, N] as well. names:
    ends of names of stacks that are not gate_up_proj and down_proj, each with the usual one. is_gated: experts have
    gates. are_gates_apart: these have a stack of their own. latent: the entry with the size of the experts' inputs and
    outputs, if some have another than hidden_size.
    """

    owners: tuple[str, ...]
    num_experts: str
    inner: str
    is_transposed: bool | None = False
    is_interleaved: bool = False
    has_biases: bool = False
    names: tuple[tuple[str, str], ...] = ()
    is_gated: bool = True
    are_gates_apart: bool = False
    latent: str = ""

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the stacks of numbers, those of the experts' inputs first."""
        if self.are_gates_apart:
            return GATE, UP, DOWN
        return (GATE_UP if self.is_gated else UP), DOWN

    @property
    def has_outputs_in_rows(self) -> bool:
        """Whether stacks are [E, N, C] for certain, gate before up, under the usual names."""
        return self.is_transposed is False and not self.is_interleaved and not self.names

    def usual_name(self, name: str) -> str:
        """Return the name that a tensor of the file would have in most files."""
        for own, usual in self.names:
            if name.endswith(own):
                return name.removesuffix(own) + usual
        return name

    def name_in_file(self, usual_name: str) -> str:
        for own, usual in self.names:
            if usual_name.endswith(usual):
                return usual_name.removesuffix(usual) + own
        return usual_name


_USUAL: Final = (".mlp.experts",)
_GRANITE: Final = Stacking(
    (".block_sparse_moe", ".block_sparse_moe.experts"), "num_local_experts", "intermediate_size",
    names=((".input_linear.weight", ".gate_up_proj"), (".output_linear.weight", ".down_proj")),
)  # fmt: skip
_GEMMA4: Final = Stacking((".experts",), "num_experts", "moe_intermediate_size")
_LLAMA4: Final = Stacking((".feed_forward.experts",), "num_local_experts", "intermediate_size", is_transposed=True)
_QWEN: Final = Stacking(_USUAL, "num_experts", "moe_intermediate_size")
_ROUTED: Final = Stacking(_USUAL, "n_routed_experts", "moe_intermediate_size")
_LOCAL: Final = Stacking(_USUAL, "num_local_experts", "intermediate_size")
# Architecture in config.json -> how its checkpoints stack experts. Published files of most have them one by one, and
# so does what transformers writes, unless it saves a model as it computes with it (save_original_format=False).
STACKINGS: Final[Mapping[str, Stacking]] = {
    "GptOssForCausalLM": Stacking(
        _USUAL, "num_local_experts", "intermediate_size", is_transposed=True, is_interleaved=True, has_biases=True
    ),
    # transformers writes what it has read in another order than that of the published files.
    "Qwen3VLMoeForConditionalGeneration": Stacking(_USUAL, "num_experts", "moe_intermediate_size", is_transposed=None),
    **dict.fromkeys(("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"), _QWEN),
    **dict.fromkeys(("HYV3ForCausalLM", "MellumForCausalLM", "LagunaForCausalLM", "FlintForCausalLM"), _QWEN),
    **dict.fromkeys(("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), _QWEN),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "AXK1ForCausalLM", "AXK2ForCausalLM"), _ROUTED),
    **dict.fromkeys(("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM"), _ROUTED),
    "HYV4ForCausalLM": _ROUTED,
    **dict.fromkeys(("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"), _ROUTED),
    **dict.fromkeys(("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"), _ROUTED),
    "Glm4vMoeForConditionalGeneration": _ROUTED,
    **dict.fromkeys(("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "MiMoV2FlashForCausalLM"), _ROUTED),
    **dict.fromkeys(("MixtralForCausalLM", "MiniMaxM2ForCausalLM", "PhimoeForCausalLM"), _LOCAL),
    **dict.fromkeys(
        ("OlmoeForCausalLM", "FlexOlmoForCausalLM", "Cohere2MoeForCausalLM"),
        Stacking(_USUAL, "num_experts", "intermediate_size"),
    ),
    "JambaForCausalLM": Stacking((".feed_forward.experts",), "num_experts", "intermediate_size"),
    "Ernie4_5_MoeForCausalLM": Stacking(_USUAL, "moe_num_experts", "moe_intermediate_size"),
    "GraniteMoeForCausalLM": _GRANITE,
    "GraniteMoeSharedForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": _GRANITE,
    "GraniteMoeSWAForCausalLM": _GRANITE,
    "NemotronHForCausalLM": Stacking(
        (".mixer.experts",), "n_routed_experts", "moe_intermediate_size", is_gated=False, latent="moe_latent_size"
    ),
    **dict.fromkeys(("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), _LLAMA4),
    "Step3p7ForConditionalGeneration": Stacking(
        (".moe",), "n_routed_experts", "moe_intermediate_size", are_gates_apart=True,
        names=tuple(
            (f".{name}.weight{suffix}", f".{name}{suffix}")
            for name in (GATE, UP, DOWN) for suffix in ("", "_scale_inv")
        ),
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StackedPart:
    """The tensor `info` of one expert, in the file's tensor `stack`.

    rows: the first of its outputs there, and the step to the next one; the end follows. is_transposed: outputs are the
    last dimension there.
    """

    info: TensorInfo
    stack: str
    expert: int
    rows: slice
    is_transposed: bool

    def of(self, stack: Tensor) -> Tensor:
        """Return the tensor from the stack: blocks and their scales as they lie there, others as rows in order."""
        own = stack[self.expert]
        own = (own.T if self.is_transposed else own)[self.rows]
        return own.contiguous() if own.dtype.is_floating_point else own.reshape(self.info.shape)


def stacked_parts(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> dict[str, StackedPart]:
    """Return the tensors of single experts in the stacks of a checkpoint, by name, in the order of the stacks.

    Raises ModelLoadError for stacks that config.json does not describe.
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    stacking = STACKINGS.get(name) if isinstance(name, str) else None
    if stacking is None:
        return {}
    sizes = _Sizes.read(stacking, config)
    stacks: dict[str, dict[str, tuple[TensorInfo, Kind]]] = {}
    for tensor in tensors:
        owner, _, leaf = stacking.usual_name(tensor.name).rpartition(".")
        kind = kind_of(stacking.projections, leaf)
        if f".{owner}".endswith(stacking.owners) and kind is not None:
            stacks.setdefault(owner, {})[leaf] = tensor, kind
    found: dict[str, StackedPart] = {}
    for owner, present in stacks.items():
        for tensor, kind in present.values():
            if kind.is_of_torchao and not stacking.has_outputs_in_rows:
                raise ModelLoadError(
                    f"torchao has quantized all experts of a layer in {tensor.name}, which is not supported for this "
                    "model\n  use its unquantized checkpoint, with --quantization q4_k_m"
                )
            # Scales lie as the numbers do.
            numbers, _ = present.get(kind.projection, (None, kind))
            is_transposed = numbers is not None and sizes.is_transposed(numbers, kind)
            sizes.check(tensor, kind, is_transposed=is_transposed)
            found |= {part.info.name: part for part in _parts(stacking, tensor, owner, kind, is_transposed)}
        leaves = {plain_leaf(leaf, kind): tensor.name for leaf, (tensor, kind) in present.items()}
        _check_complete(stacking, owner, {leaf: name for leaf, name in leaves.items() if leaf})
    return found


def separated(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Return tensors with those of single experts in place of stacks. Raises as stacked_parts."""
    stored = list(tensors)
    of_stack: dict[str, list[TensorInfo]] = {}
    for part in stacked_parts(config, stored).values():
        of_stack.setdefault(part.stack, []).append(part.info)
    return [one for tensor in stored for one in of_stack.get(tensor.name, [tensor])]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes in config.json; None where it has none. block: rows and columns that share a scale.

    width: C of the first projection.
    """

    stacking: Stacking
    num_experts: int | None
    width: int | None
    inner: int | None
    block: tuple[int, int] | None

    @classmethod
    def read(cls, stacking: Stacking, config: Mapping[str, Any]) -> _Sizes:
        text = config.get("text_config")
        values = text if isinstance(text, Mapping) else config
        # transformers writes num_local_experts since its version 5; Step 3.7 was published with the second name.
        candidates = (stacking.num_experts, "moe_num_experts", "num_local_experts")
        num_experts = next((name for name in candidates if name in values), stacking.num_experts)
        inputs = "hidden_size" if values.get(stacking.latent) is None else stacking.latent
        names = num_experts, inputs, stacking.inner
        experts, width, inner = (value if isinstance(value := values.get(name), int) else None for name in names)
        return cls(stacking, experts, width, inner, _block_of(config))

    def is_transposed(self, numbers: TensorInfo, kind: Kind) -> bool:
        """Whether the outputs in a stack with these numbers are the last dimension; if both may be, they are not."""
        if kind.suffix not in ("", SCALE_INV):
            return False
        if self.stacking.is_transposed is not None:
            return self.stacking.is_transposed
        inputs = self.inner if kind.projection == DOWN else self.width
        return numbers.shape[1:2] == (inputs,) and numbers.shape[-1] != inputs

    def check(self, tensor: TensorInfo, kind: Kind, *, is_transposed: bool) -> None:
        """Raise ModelLoadError unless a stack has the shape that config.json says, as far as it says it."""
        if self.num_experts is None or self.width is None or self.inner is None:
            if len(tensor.shape) != kind.num_dimensions:
                raise ModelLoadError(
                    f"cannot load {tensor.name}: its shape is {list(tensor.shape)}, and it must have "
                    f"{kind.num_dimensions} dimensions\n{_FIX}"
                )
            return
        outputs, inputs = (2 if kind.projection == GATE_UP else 1) * self.inner, self.width
        if kind.projection == DOWN:
            outputs, inputs = self.width, self.inner
        if kind.suffix == SCALE_INV:
            rows, columns = self._block_for(tensor, kind, is_transposed=is_transposed)
            outputs, inputs = -(-outputs // rows), -(-inputs // columns)
        expected: tuple[int, ...] = (self.num_experts, outputs)
        if kind.suffix in ("", SCALE_INV):
            expected = (self.num_experts, inputs, outputs) if is_transposed else (*expected, inputs)
        elif kind.suffix == "_blocks":
            expected = (*expected, inputs // _BLOCK, _BLOCK // 2)
        elif kind.suffix == "_scales":
            expected = (*expected, inputs // _BLOCK)
        elif kind.suffix != "_bias":
            # Bits and groups, which are not known here, say how many words or scales a row has.
            expected = (*expected, tensor.shape[-1] if len(tensor.shape) == 3 else 1)
        if tensor.shape != expected:
            raise ModelLoadError(
                f"cannot load {tensor.name}: its shape is {list(tensor.shape)}, and config.json says {list(expected)}\n"
                + _FIX
            )

    def _block_for(self, scales: TensorInfo, kind: Kind, *, is_transposed: bool) -> tuple[int, int]:
        """Return the rows and columns that share one of these scales. Raises ModelLoadError."""
        rows, columns = self.block or (1, 0)
        if self.block is None or (is_transposed and rows != columns):
            raise ModelLoadError(
                f"cannot load {scales.name}: experts of a layer in one tensor need a weight_block_size in config.json"
                f"{', as many rows as columns,' * is_transposed} for such scales\n{_FIX}"
            )
        if kind.projection == GATE_UP and self.inner is not None and self.inner % rows:
            raise ModelLoadError(
                f"cannot load {scales.name}: some of its blocks of {rows} rows are in gate and in up\n"
                "  use another checkpoint of this model"
            )
        return rows, columns


def _block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale by config.json; None if it does not say so."""
    packing = config.get("quantization_config")
    block = packing.get("weight_block_size") if isinstance(packing, Mapping) else None
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block[0], block[1]
    return None


def _parts(
    stacking: Stacking, tensor: TensorInfo, owner: str, kind: Kind, is_transposed: bool
) -> Iterator[StackedPart]:
    outputs = tensor.shape[-1 if is_transposed else 1]
    # A block of FP4 is a row of its own in a stack.
    inputs = (tensor.shape[1],) if is_transposed else (prod(tensor.shape[2:]),) * (kind.suffix != "_bias")
    if kind.projection != GATE_UP:
        rows = {kind.projection: slice(None)}
    elif stacking.is_interleaved:
        rows = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    else:
        rows = {"gate_proj": slice(0, outputs // 2), "up_proj": slice(outputs // 2, None)}
    for expert in range(tensor.shape[0]):
        for name, own in rows.items():
            shape = (outputs // len(rows), *inputs)
            info = replace(
                tensor, name=f"{owner}.{expert}.{name}.{kind.leaf}", shape=shape,
                num_bytes=tensor.num_bytes // max(1, tensor.shape[0] * len(rows)),
            )  # fmt: skip
            yield StackedPart(info, tensor.name, expert, own, is_transposed)


def _check_complete(stacking: Stacking, owner: str, leaves: Mapping[str, str]) -> None:
    """Raise ModelLoadError unless a module has all of its stacks: numbers or blocks, and biases.

    leaves: usual names of those it has, each with its own name.
    """
    suffixes = [""]
    if any(leaf.endswith(("_blocks", "_scales")) for leaf in leaves):
        suffixes = ["_blocks", "_scales"]
    elif any(leaf.endswith("_packed") for leaf in leaves):
        suffixes = ["_packed"]
    suffixes += [end for end in (SCALE, SCALE_INV) if any(leaf.endswith(end) for leaf in leaves)]
    suffixes += ["_bias"] * stacking.has_biases
    wanted = [f"{projection}{suffix}" for projection in stacking.projections for suffix in suffixes]
    missing = [f"{owner}.{leaf}" for leaf in wanted if leaf not in leaves]
    if any(name != f"{owner}.{leaf}" for leaf, name in leaves.items()):
        missing = [stacking.name_in_file(name) for name in missing]
    if missing:
        count = "1 tensor" if len(missing) == 1 else f"{len(missing)} tensors"
        raise ModelLoadError(f"the checkpoint lacks {count} of this model: {', '.join(missing)}\n{_FIX}")
    if extra := [f"{owner}.{leaf}" for leaf in leaves if leaf not in wanted]:
        raise ModelLoadError(f"the model has no place for {', '.join(sorted(extra))}\n{_FIX}")
