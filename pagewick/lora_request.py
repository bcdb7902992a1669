"""LoRARequest: names the LoRA adapter of a request in Python, with vLLM's names. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pagewick.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for `LLM.generate(..., lora_request=...)` and the like.

    lora_name: its name. lora_int_id: vLLM's number of it, which changes nothing here. lora_path: a directory that PEFT
    has written, a GGUF file of llama.cpp, or an id on a hub; empty for an adapter that is loaded already, as by
    EngineConfig.lora_modules. An adapter is loaded when it is first used. Raises ArgumentError without a name.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ArgumentError(f"LoRARequest needs a lora_name, a text; got {self.lora_name!r}")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path
