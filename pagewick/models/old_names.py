"""Old names of architectures: classes were called so before they became part of transformers. Imports no torch."""

from __future__ import annotations

from typing import Final

OLD_ARCHITECTURES: Final = {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "GPTBigCodeLMHeadModel": "GPTBigCodeForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
}
