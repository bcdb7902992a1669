"""Loads LoRA adapters into the layers of one rank's model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pagewick.config import EngineConfig
from pagewick.engine.batch import AdapterLoad, StepOutput
from pagewick.errors import ModelLoadError, PagewickError
from pagewick.log import get_logger
from pagewick.models.adapters import AdaptedWeight, adapted_weights, lora_layers, short_name
from pagewick.models.config import ModelConfig
from pagewick.models.decoder import Decoder
from pagewick.parallel.collectives import Collectives
from pagewick.weights.files import name_some
from pagewick.weights.lora.adapter import Adapter, Factors
from pagewick.weights.lora.reading import read_adapter
from pagewick.weights.transposed import has_transposed

logger = get_logger(__name__)


class AdapterLoader:
    """model: this rank's share, whose layers have room for adapters. options: resolved."""

    def __init__(self, model: Decoder, config: ModelConfig, options: EngineConfig, collectives: Collectives) -> None:
        assert options.max_lora_rank is not None, "loading the model resolves it"
        self._config = config
        self._paths = options.adapter_paths
        self._max_rank = options.max_lora_rank
        self._weights = adapted_weights(model)
        # Other ranks hold further layers, of which this one knows the names.
        self._layers = [layer for layer in lora_layers(self._weights) if not layer.is_elsewhere]
        self._collectives = collectives

    @property
    def used_layers(self) -> list[bool]:
        """Whether some adapter changes a layer, for each layer."""
        return [layer.is_used for layer in self._layers]

    def load(self, wanted: AdapterLoad) -> StepOutput:
        """Load an adapter on all ranks, each of which must call this, or on none; return why not, or its digest."""
        problem, path = "", wanted.path
        try:
            if not Path(path).exists():
                path = self._paths.get(wanted.name, path)
            adapter = read_adapter(
                Path(path),
                self._config.num_heads,
                self._config.num_kv_heads,
                is_transposed=has_transposed(self._config.architecture),
            )
            factors = self._check(adapter, path)
        except PagewickError as error:
            problem = str(error)
        except Exception as error:
            # Nothing has changed yet, and the other ranks wait below: whatever the files hold, the engine goes on.
            logger.exception("reading the LoRA adapter %s failed", path)
            problem = f"reading the LoRA adapter {path} failed: {type(error).__name__}: {error}\n  check its files"
        (is_fine,) = self._collectives.minimum([int(not problem)])
        if not is_fine:
            return StepOutput([], adapter_error=problem or f"another rank cannot load the adapter {wanted.path}")
        for layer in self._layers:
            layer.load(wanted.number, factors.get(id(layer), {}))
        return StepOutput([], adapter_digest=adapter.digest)

    def _check(self, adapter: Adapter, path: str) -> Mapping[int, dict[str | None, Factors]]:
        """Return an adapter's factors by layer and part. Raises ModelLoadError if they do not fit the model."""
        self._check_order(adapter, path)
        found: dict[int, dict[str | None, Factors]] = {}
        unknown: list[str] = []
        for name, factors in adapter.factors.items():
            weight = self._weights.get(short_name(name))
            if weight is None:
                unknown.append(name)
                continue
            _check_factors(name, factors, weight, path)
            parts = found.setdefault(id(weight.layer), {})
            if weight.part in parts:
                raise ModelLoadError(f"{path} has factors of {short_name(name)} twice, under different names")
            parts[weight.part] = factors
        if unknown:
            raise ModelLoadError(
                f"{path} changes weights that adapters cannot change in this model: {name_some(sorted(unknown))}\n"
                "  adapters may change linear layers of the text, but not experts, embeddings, the vocabulary head or\n"
                "  encoders of images; is it an adapter of this model? if so, merge it into the model"
            )
        if adapter.max_rank > self._max_rank:
            raise ModelLoadError(
                f"{path} has the rank {adapter.max_rank}, and there is room for {self._max_rank}\n"
                f"  give --max-lora-rank {adapter.max_rank}"
            )
        return found

    def _check_order(self, adapter: Adapter, path: str) -> None:
        """Raise ModelLoadError if the adapter's value heads are in another order than those of linear attention."""
        deltas = self._config.deltas
        is_ordered = any(delta.num_value_heads > delta.num_key_heads for delta in deltas)
        is_tiled = any(delta.is_tiled for delta in deltas)
        changed = [name for name in adapter.factors if ".linear_attn." in name]
        if is_ordered and changed and adapter.is_gguf != is_tiled:
            has, needs = ("a GGUF file", "safetensors") if adapter.is_gguf else ("no GGUF file", "GGUF")
            raise ModelLoadError(
                f"{path} changes {name_some(sorted(changed))}, whose heads have another order in GGUF files; it is "
                f"{has}\n"
                f"  give an adapter in the form of the model: {needs}"
            )


def _check_factors(name: str, factors: Factors, weight: AdaptedWeight, path: str) -> None:
    """Raise ModelLoadError unless the shapes of the factors are those of the weight."""
    num_rows, num_columns = weight.shape
    if len(factors.b) != num_rows or factors.a.shape[1] != num_columns:
        raise ModelLoadError(
            f"{path} changes {name} as a matrix of {len(factors.b)} x {factors.a.shape[1]}, and the model's is "
            f"{num_rows} x {num_columns}\n  is it an adapter of this model?"
        )
