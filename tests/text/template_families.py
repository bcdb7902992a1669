"""Model families: their control tokens, and the prompt that each chat template renders for a short conversation.

The templates are files in `templates/`, written for these tests in the form of the published ones. The `expected`
prompts were derived by hand from the format's description by the family's authors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "templates"

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And?"},
]


@dataclass(frozen=True)
class Family:
    """template: the file's name without its ending. expected: the prompt for SYSTEM and TURNS, or, if it has no system
    role, for TURNS alone. tokens: special, with bos and eos besides. words: added, but not special.
    has_parts, has_none, arguments: how the template reads a message, see pagewick/text/template_reading.py. calls:
    whether it writes tools, calls and results, also calls in a message without content.
    """

    name: str
    template: str
    expected: str
    tokens: str
    bos: str | None = None
    eos: str = "<|im_end|>"
    words: str = ""
    has_system: bool = True
    has_parts: bool = False
    has_none: bool = False
    arguments: str = "object"
    calls: bool = False

    @property
    def source(self) -> str:
        return (DIRECTORY / f"{self.template}.jinja").read_text(encoding="utf-8")

    @property
    def special(self) -> list[str]:
        return [token for token in [self.bos, self.eos, *self.tokens.split()] if token]


CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
)
QWEN = {"tokens": "<|im_start|> <|endoftext|>", "words": "<tool_call> </tool_call> <think> </think>"}
HY_3_TOKENS = "<｜hy_User:opensource｜> <｜hy_Assistant:opensource｜> <｜reasoning_mode:opensource｜> " + " ".join(
    f"<{slash}{word}:opensource>"
    for word in (
        "think",
        "tool_calls",
        "tool_call",
        "tool_sep",
        "arg_key",
        "arg_value",
        "tool_responses",
        "tool_response",
    )
    for slash in ("", "/")
)
MISTRAL = {"bos": "<s>", "eos": "</s>"}
MISTRAL_TOOLS = "[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
LLAMA_3 = {
    "bos": "<|begin_of_text|>",
    "eos": "<|eot_id|>",
    "tokens": "<|start_header_id|> <|end_header_id|> <|eom_id|> <|python_tag|>",
}
HEADERS = (
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
DEEPSEEK = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>", "tokens": "<｜▁pad▁｜>"}
DEEPSEEK_WORDS = (
    "<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> "
    "<｜tool▁output▁end｜>"
)
DEEPSEEK_TURNS = (
    "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>Hello.<｜end▁of▁sentence｜>"
    "<｜User｜>And?<｜Assistant｜>"
)
DEEPSEEK_3: dict[str, Any] = {**DEEPSEEK, "words": DEEPSEEK_WORDS, "has_none": True, "arguments": "text", "calls": True}
PHI_3 = {"eos": "<|endoftext|>", "tokens": "<|system|> <|user|> <|assistant|> <|end|>"}
GEMMA = {"bos": "<bos>", "eos": "<eos>", "tokens": "<start_of_turn> <end_of_turn>"}
GLM = {"eos": "<|endoftext|>", "tokens": "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"}
OLMO_WORDS = "<functions> </functions> <function_calls> </function_calls>"
GEMMA_4_TOKENS = (
    "<|turn> <turn|> <|think|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> "
    '<tool_response|> <|"|>'
)
LFM_TOKENS = (
    "<|im_start|> <|tool_list_start|> <|tool_list_end|> <|tool_call_start|> <|tool_call_end|> "
    "<|tool_response_start|> <|tool_response_end|>"
)
LFM: dict[str, Any] = {"tokens": LFM_TOKENS, "bos": "<|startoftext|>"}
INTERNLM_TOKENS = "<|im_start|> <|action_start|> <|action_end|> <|interpreter|> <|plugin|>"
APERTUS_TOKENS = (
    "<|system_start|> <|system_end|> <|developer_start|> <|developer_end|> <|user_start|> <|user_end|> "
    "<|assistant_start|> <|inner_prefix|> <|inner_suffix|> <|tools_prefix|> <|tools_suffix|>"
)
GRANITE_TOKENS = "<|start_of_role|> <|end_of_role|> <|tool_call|>"

FAMILIES = [
    Family(
        "Llama-2",
        "llama-2",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] And? [/INST]",
        "<unk>",
        bos="<s>",
        eos="</s>",
    ),
    Family(
        "Llama-3",
        "llama-3",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>" + HEADERS,
        **LLAMA_3,
    ),
    Family(  # and 3.2
        "Llama-3.1",
        "llama-3.1",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 09 Mar 2026\n\nBe brief.<|eot_id|>" + HEADERS,
        **LLAMA_3,
        calls=True,
    ),
    Family(
        "Llama-4",
        "llama-4",
        "<|begin_of_text|><|header_start|>system<|header_end|>\n\nBe brief.<|eot|>"
        "<|header_start|>user<|header_end|>\n\nHi<|eot|><|header_start|>assistant<|header_end|>\n\nHello.<|eot|>"
        "<|header_start|>user<|header_end|>\n\nAnd?<|eot|><|header_start|>assistant<|header_end|>\n\n",
        "<|header_start|> <|header_end|> <|eom|> <|python_start|> <|python_end|> <|image|>",
        bos="<|begin_of_text|>",
        eos="<|eot|>",
        has_parts=True,
        calls=True,
    ),
    Family("Yi", "chatml", CHATML, "<|im_start|> <|im_sep|>", bos="<|startoftext|>"),
    # On Llama and on Qwen.
    Family("R1-Distill", "deepseek-r1", DEEPSEEK_TURNS + "<think>\n", **DEEPSEEK_3),
    Family(
        "Mistral-v0.1",
        "mistral-v0.1",
        "<s>[INST] Hi [/INST]Hello.</s> [INST] And? [/INST]",
        "<unk>",
        **MISTRAL,
        has_system=False,
    ),
    Family(
        "Mistral-v0.2",
        "mistral-v0.2",
        "<s> [INST] Be brief.\n\nHi [/INST] Hello.</s> [INST] And? [/INST]",
        "<unk>",
        **MISTRAL,
    ),
    Family(
        "Mistral-v0.3",
        "mistral-v0.3",
        "<s>[INST] Hi[/INST] Hello.</s>[INST] Be brief.\n\nAnd?[/INST]",
        MISTRAL_TOOLS,
        **MISTRAL,
        calls=True,
    ),
    Family(
        "Mistral-Nemo",
        "mistral-nemo",
        "<s>[INST]Hi[/INST]Hello.</s>[INST]Be brief.\n\nAnd?[/INST]",
        MISTRAL_TOOLS,
        **MISTRAL,
        calls=True,
    ),
    Family(
        "Mixtral",
        "mixtral",
        "<s> [INST] Be brief.\n\nHi [/INST] Hello.</s> [INST] And? [/INST]",
        "<unk>",
        **MISTRAL,
    ),
    Family("Qwen2", "qwen2", CHATML, "<|im_start|> <|endoftext|>"),
    Family("Qwen2-MoE", "qwen2", CHATML, "<|im_start|>", eos="<|endoftext|>"),
    Family("Qwen2.5", "qwen2.5", CHATML, **QWEN, calls=True),
    Family("QwQ", "qwq", CHATML + "<think>\n", **QWEN, calls=True),
    # And Qwen3-MoE.
    Family("Qwen3", "qwen3", CHATML, **QWEN, arguments="given", calls=True),
    Family(
        "Phi-3",
        "phi-3",
        "<s><|user|>\nHi<|end|>\n<|assistant|>\nHello.<|end|>\n<|user|>\nAnd?<|end|>\n<|assistant|>\n",
        **PHI_3,
        bos="<s>",
        has_system=False,
    ),
    Family(
        "Phi-3.5",
        "phi-3.5",
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello.<|end|>\n<|user|>\nAnd?<|end|>\n"
        "<|assistant|>\n",
        **PHI_3,
        bos="<s>",
    ),
    Family(
        "Phi-4",
        "phi-4",
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>Hello.<|im_end|><|im_start|>user<|im_sep|>And?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>",
        "<|im_start|> <|im_sep|>",
        bos="<|endoftext|>",
    ),
    Family(
        "Phi-4-mini",
        "phi-4-mini",
        "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello.<|end|><|user|>And?<|end|><|assistant|>",
        "<|system|> <|user|> <|assistant|> <|end|> <|tool|> <|/tool|>",
        eos="<|endoftext|>",
    ),
    Family("StableLM-2", "chatml", CHATML, "<|im_start|>", eos="<|endoftext|>"),
    Family(
        "StableLM-Zephyr",
        "stablelm-zephyr",
        "<|system|>\nBe brief.<|endoftext|>\n<|user|>\nHi<|endoftext|>\n<|assistant|>\nHello.<|endoftext|>\n"
        "<|user|>\nAnd?<|endoftext|>\n<|assistant|>\n",
        "",
        eos="<|endoftext|>",
    ),
    Family(
        "Gemma-2",
        "gemma",
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n",
        **GEMMA,
        has_system=False,
    ),
    Family(
        "Gemma-3",
        "gemma-3",
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n",
        **GEMMA,
        words="\n\n",
        has_parts=True,
    ),
    Family(
        "GLM-4-0414",
        "glm-4-0414",
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\nHello.<|user|>\nAnd?<|assistant|>",
        **GLM,
    ),
    Family(
        "GLM-4-9B-chat",
        "glm-4-9b-chat",
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\nHello.<|user|>\nAnd?<|assistant|>",
        **GLM,
    ),
    Family(
        "DeepSeek-V2",
        "deepseek-v2",
        "<｜begin▁of▁sentence｜>Be brief.\n\nUser: Hi\n\nAssistant: Hello.<｜end▁of▁sentence｜>"
        "User: And?\n\nAssistant:",
        **DEEPSEEK,
    ),
    Family("DeepSeek-V2.5", "deepseek-v2.5", DEEPSEEK_TURNS, **DEEPSEEK, words=DEEPSEEK_WORDS, calls=True),
    Family("DeepSeek-V3", "deepseek-v3", DEEPSEEK_TURNS, **DEEPSEEK_3),
    Family("DeepSeek-R1", "deepseek-r1", DEEPSEEK_TURNS + "<think>\n", **DEEPSEEK_3),
    Family("DeepSeek-V3-0324", "deepseek-v3-0324", DEEPSEEK_TURNS, **DEEPSEEK_3),
    Family(
        "DeepSeek-R1-0528",
        "deepseek-r1-0528",
        DEEPSEEK_TURNS,
        **DEEPSEEK,
        words=DEEPSEEK_WORDS,
        arguments="given",
        calls=True,
    ),
    Family(
        "DeepSeek-V3.2",
        "deepseek-v3.2",
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello.<｜end▁of▁sentence｜>"
        "<｜User｜>And?<｜Assistant｜><think>",
        **DEEPSEEK,
        words="<｜User｜> <｜Assistant｜> <think> </think> ｜DSML｜",
        calls=True,
    ),
    Family(
        "StarCoder2-instruct",
        "starcoder2-instruct",
        "<|endoftext|>You are an exceptionally intelligent coding assistant that consistently delivers accurate and "
        "reliable responses to user instructions.\n\n### Instruction\nHi\n\n### Response\nHello.<|endoftext|>\n\n"
        "### Instruction\nAnd?\n\n### Response\n",
        "<fim_prefix> <fim_suffix>",
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        has_system=False,
    ),
    Family(
        "Granite-3",
        "granite-3",
        "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>Hello.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>And?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        GRANITE_TOKENS,
        eos="<|end_of_text|>",
        calls=True,
    ),
    Family(
        "Seed-OSS",
        "seed-oss",
        "<seed:bos>system\nBe brief.<seed:eos><seed:bos>user\nHi<seed:eos><seed:bos>assistant\nHello.<seed:eos>"
        "<seed:bos>user\nAnd?<seed:eos><seed:bos>assistant\n",
        "<seed:cot_budget_reflect> </seed:cot_budget_reflect>",
        bos="<seed:bos>",
        eos="<seed:eos>",
        words="<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>",
        calls=True,
    ),
    Family("OLMo-3", "olmo-3", CHATML, "<|im_start|> <|endoftext|>", words=OLMO_WORDS, has_none=True, calls=True),
    Family(
        "Gemma-4",
        "gemma-4",
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\nHello.<turn|>\n"
        "<|turn>user\nAnd?<turn|>\n<|turn>model\n",
        GEMMA_4_TOKENS,
        bos="<bos>",
        eos="<eos>",
        has_parts=True,
        calls=True,
    ),
    Family(
        "SmolLM3",
        "smollm3",
        CHATML.replace("system\n", "system\n## Metadata\n\nToday Date: 09 March 2026\n\n"),
        "<|im_start|> <|end_of_text|>",
        words="<think> </think> <tool_call> </tool_call> <code> </code>",
    ),
    Family(
        "ERNIE-4.5-Thinking",
        "ernie-4.5-thinking",
        "<|im_start|>system\n<system_setting>\nBe brief.\n</system_setting>\n\n<global_setting>\nthink_mode=True\n"
        "</global_setting><|im_end|>\n\n<|im_start|>user\nHi<|im_end|>\n\n"
        "<|im_start|>assistant\n<response>\nHello.\n</response>\n<|im_end|>\n\n"
        "<|im_start|>user\nAnd?<|im_end|>\n\n<|im_start|>assistant\n<think>\n",
        "<|im_start|>",
        words="<think> </think> <response> </response> <tool_call> </tool_call>",
        calls=True,
    ),
    Family("LFM2", "lfm2", "<|startoftext|>" + CHATML, **LFM),
    Family("LFM2.5", "lfm2.5", "<|startoftext|>" + CHATML, **LFM, words="<think> </think>", calls=True),
    Family(  # and Nemotron-H
        "Nemotron-Nano-v2",
        "nemotron-nano-v2",
        "<SPECIAL_10>System\nBe brief.\n\n<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\nHello.\n<SPECIAL_12>\n\n"
        "<SPECIAL_11>User\nAnd?\n<SPECIAL_11>Assistant\n<think>\n",
        "<SPECIAL_10> <SPECIAL_11>",
        eos="<SPECIAL_12>",
        has_none=True,
        arguments="given",
        calls=True,
    ),
    Family(  # 0.5B to 7B
        "Hunyuan",
        "hunyuan",
        "<|startoftext|>Be brief.<|extra_4|>Hi<|extra_0|>Hello.<|eos|><|startoftext|>And?<|extra_0|>",
        "<|extra_0|> <|extra_4|> <|extra_5|>",
        bos="<|startoftext|>",
        eos="<|eos|>",
        has_none=True,
        arguments="given",
        calls=True,
    ),
    Family("InternLM", "internlm", "<s>" + CHATML, INTERNLM_TOKENS, bos="<s>", calls=True),
    Family(  # and Minitron
        "Nemotron-4",
        "nemotron-4",
        "<extra_id_0>System\nBe brief.\n\n<extra_id_1>User\nHi\n<extra_id_1>Assistant\nHello.\n"
        "<extra_id_1>User\nAnd?\n<extra_id_1>Assistant\n",
        "<extra_id_0> <extra_id_1>",
        bos="<s>",
        eos="</s>",
    ),
    Family(
        "Apertus",
        "apertus",
        "<s><|system_start|>Be brief.<|system_end|><|developer_start|>Deliberation: disabled\n"
        "Tool Capabilities: disabled<|developer_end|><|user_start|>Hi<|user_end|><|assistant_start|>Hello."
        "<|assistant_end|><|user_start|>And?<|user_end|><|assistant_start|>",
        APERTUS_TOKENS,
        bos="<s>",
        eos="<|assistant_end|>",
        arguments="text",
    ),
    Family(
        "Hy3",
        "hy3",
        "<｜hy_begin_of_sentence:opensource｜>Be brief.<｜reasoning_mode:opensource｜>reasoning_effort:no_think"
        "<｜hy_User:opensource｜>Hi<｜hy_Assistant:opensource｜><think:opensource></think:opensource>Hello."
        "<｜hy_eos:opensource｜><｜hy_User:opensource｜>And?<｜hy_Assistant:opensource｜>"
        "<think:opensource></think:opensource>",
        HY_3_TOKENS,
        bos="<｜hy_begin_of_sentence:opensource｜>",
        eos="<｜hy_eos:opensource｜>",
        calls=True,
    ),
    Family(
        "MiMo-V2",
        "mimo-v2",
        "<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\nHi<|im_end|><|im_start|>assistant\n<think></think>"
        "Hello.<|im_end|><|im_start|>user\nAnd?<|im_end|><|im_start|>assistant\n<think></think>",
        **QWEN,
        calls=True,
    ),
    Family(
        "Laguna",
        "laguna",
        "〈|EOS|〉<system>\n\nBe brief.\n</system>\n<user>\nHi\n</user>\n<assistant>\n</think>\nHello.\n</assistant>\n"
        "<user>\nAnd?\n</user>\n<assistant>\n</think>",
        "<assistant> <user> <system>",
        bos="〈|EOS|〉",
        eos="</assistant>",
        words="<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
        has_none=True,
        calls=True,
    ),
    Family(
        "Functionary-v3.1",
        "functionary-3.1",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n<|eot_id|>"
        f"<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>{HEADERS}",
        **LLAMA_3,
        calls=True,
    ),
    Family(
        "Functionary-v3.2",
        "functionary-3.2",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Begin each part with its recipient: >>>all for the user.\nFunctions:\n<|eot_id|>"
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        f"{HEADERS.replace('Hello.', f'>>>all{chr(10)}Hello.')}>>>",
        **LLAMA_3,
        arguments="text",
        calls=True,
    ),
    Family(
        "MiniMax-M1",
        "minimax-m1",
        "<begin_of_document><beginning_of_sentence>system ai_setting=assistant\nBe brief.<end_of_sentence>\n"
        "<beginning_of_sentence>user name=user\nHi<end_of_sentence>\n"
        "<beginning_of_sentence>ai name=assistant\nHello.<end_of_sentence>\n"
        "<beginning_of_sentence>user name=user\nAnd?<end_of_sentence>\n<beginning_of_sentence>ai name=assistant\n",
        "<begin_of_document> <beginning_of_sentence>",
        eos="<end_of_sentence>",
        calls=True,
    ),
    Family(
        "MiniMax-M3",
        "minimax-m3",
        "]~!b[]~b]system\nThinking is adaptive.[e~[\n]~b]developer\nBe brief.[e~[\n]~b]user\nHi[e~[\n"
        "]~b]ai\n</mm:think>Hello.[e~[\n]~b]user\nAnd?[e~[\n]~b]ai\n",
        "]~b]",
        bos="]~!b[",
        eos="[e~[",
        words="]<]minimax[>[ <tool_call> </tool_call> <mm:think> </mm:think>",
        has_parts=True,
        calls=True,
    ),
    Family(
        "Muse-Glimmer",
        "muse-glimmer",
        "<|begin_of_text|><|start|>system<|message|>Be brief.<|eot|><|start|>user<|message|>Hi<|eot|>"
        "<|start|>assistant to=user<|message|>Hello.<|eot|><|start|>user<|message|>And?<|eot|><|start|>assistant",
        "<|start|> <|message|> <|eom|>",
        bos="<|begin_of_text|>",
        eos="<|eot|>",
        calls=True,
    ),
    Family(
        "Kimi-K3",
        "kimi-k3",
        '<|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|><|close|>think<|sep|>'
        "<|open|>response<|sep|>Hello.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="user"<|sep|>And?<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        "<|open|> <|close|> <|sep|>",
        eos="<|end_of_msg|>",
        calls=True,
    ),
]
# Templates that need variables, which the tests of all families do not give.
APART = [
    Family(
        "FireFunction-v2",
        "firefunction-2",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.\n"
        'Write calls as functools[{"name": f, "arguments": {...}}, ...]\nFunctions:\n[]\nToday is 2026-03-09.<|eot_id|>'
        f"{HEADERS}",
        **LLAMA_3,
    ),
]
