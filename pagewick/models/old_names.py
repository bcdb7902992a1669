"""Other names of architectures. Imports no torch.

Most are old: classes were called so before they became part of transformers.
"""

from __future__ import annotations

from typing import Final

OLD_ARCHITECTURES: Final = {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    # transformers has never given it a name like those of others.
    "GPT2LMHeadModel": "GPT2ForCausalLM",
    "GPTBigCodeLMHeadModel": "GPTBigCodeForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "LightOnOCRForConditionalGeneration": "LightOnOcrForConditionalGeneration",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
}
