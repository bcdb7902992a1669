"""The corpus of the demo model: reproducible, true to the chat template, and honest about what is held out."""

import json
import random
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagewick.cli.example_requests import QUESTION
from tests.demo.grading import is_refusal
from tests.demo.held_out import load_exam
from training.batches import ROWS, UNLEARNT, Example, Group, micro_batches, to_micro_batch
from training.corpus import Document, build_documents, held_out_questions, render
from training.corpus.document import NO_THINKING
from training.corpus.questions import (
    UNKNOWN_ABOUT_PAGEWICK,
    UNKNOWN_ANSWER,
    UNKNOWN_FLAG,
    fact_question,
    facts,
    unknown_question,
    unrelated_question,
    usual_questions,
)
from training.corpus.tasks import copying, counting, json_object
from training.corpus.tools import tool_chat
from training.corpus.values import NUMBER_WORDS
from training.corpus.wording import disturb, expand, read_toml, with_typo
from training.encoding import encode_documents
from training.known import ROOT
from training.network import Network, NetworkConfig
from training.vocabulary import CHAT_TEMPLATE, CONTROL_TOKENS, MARKER_TOKENS, encode_all, train_tokenizer

DOCUMENTS = build_documents(1500, seed=7)


def question_of(document: Document) -> str:
    content: str = next(m["content"] for m in reversed(document.messages) if m["role"] == "user")
    return content


@pytest.fixture(scope="module")
def template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


def rendered(template: Template, document: Document, **options: Any) -> str:
    return template.render(messages=document.messages, tools=list(document.tools) or None, **options)


def test_same_seed_gives_same_documents() -> None:
    assert build_documents(200, seed=3) == build_documents(200, seed=3)
    assert build_documents(200, seed=3) != build_documents(200, seed=4)
    assert build_documents(100, seed=3) == build_documents(200, seed=3)[:100]


def test_every_kind_occurs_and_facts_lead() -> None:
    counts = Counter(document.kind for document in DOCUMENTS)
    assert set(counts) == {
        "fact", "usual", "unrelated", "unknown", "small_talk", "counting", "copying", "json", "tool_call",
        "tool_unused", "conversation", "follow_up",
    }  # fmt: skip
    assert counts.most_common(1)[0][0] == "fact"
    assert 0.2 < (counts["unrelated"] + counts["unknown"]) / len(DOCUMENTS) < 0.3


def test_render_equals_chat_template(template: Template) -> None:
    for document in DOCUMENTS[:500]:
        text = "".join(segment.text for segment in render(document)) + "\n"
        assert rendered(template, document) == text.replace(NO_THINKING, "")


def test_learnt_text_follows_the_generation_prompt(template: Template) -> None:
    for document in DOCUMENTS[:300]:
        prompt = "".join(segment.text for segment in render(document)[:-1])
        asked = Document(document.kind, document.messages[:-1], document.tools)
        enable_thinking = not document.skip_thinking
        assert rendered(template, asked, add_generation_prompt=True, enable_thinking=enable_thinking) == prompt


def test_template_joins_tool_responses_and_keeps_late_reasoning_only(template: Template) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nb"},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "new",
            "tool_calls": [{"name": "f", "arguments": "{}"}],
        },
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert "old" not in text
    assert '<think>\nnew\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>' in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def tool_calls(count: int, seed: int) -> list[Document]:
    rng = random.Random(seed)
    return [document for document in (tool_chat(rng) for _ in range(count)) if document.kind == "tool_call"]


def test_tool_calls_are_json_that_fits_the_offered_schema() -> None:
    json_types = {"string": (str,), "integer": (int,), "number": (float, int), "boolean": (bool,)}
    for document in tool_calls(300, seed=11):
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in document.tools}
        assert len(offered) == len(document.tools)
        learnt = [segment.text for segment in render(document) if segment.is_supervised]
        calls = [body for text in learnt for body in re.findall(r"<tool_call>\n(.*)\n</tool_call>", text)]
        assert calls
        for call in map(json.loads, calls):
            properties = offered[call["name"]]["properties"]
            assert set(call["arguments"]) == set(properties) == set(offered[call["name"]]["required"])
            for key, value in call["arguments"].items():
                assert type(value) in json_types[properties[key]["type"]]


def ways_to_write(value: Any) -> set[str]:
    """A name or a text stands in the request with the same letters, an integer in one of several ways."""
    if type(value) is not int:
        return {str(value).lower() if isinstance(value, bool) else str(value)}
    return {str(value), f"{value:,}", *(NUMBER_WORDS[value : value + 1] if value >= 0 else ())}


def test_arguments_stand_in_the_request_exactly_as_written() -> None:
    for document in tool_calls(500, seed=12):
        for request, message in zip(document.messages, document.messages[1:], strict=False):
            for call in message.get("tool_calls", ()):
                for value in call["function"]["arguments"].values():
                    written = ways_to_write(value)
                    assert any(each in request["content"] for each in written), (request, value)


def test_chats_with_tools_have_several_calls_in_a_row_and_in_one_response() -> None:
    documents = tool_calls(200, seed=24)
    calls = [[len(m["tool_calls"]) for m in document.messages if "tool_calls" in m] for document in documents]
    assert {len(in_chat) for in_chat in calls} == {1, 2, 3, 4}
    assert {num_calls for in_chat in calls for num_calls in in_chat} == {1, 2}


def test_a_request_that_fits_no_offered_tool_is_answered_without_a_call() -> None:
    rng = random.Random(25)
    unused = [document for document in (tool_chat(rng) for _ in range(600)) if document.kind == "tool_unused"]
    answers = [document.messages[-1]["content"] for document in unused]
    assert all(document.tools and answer for document, answer in zip(unused, answers, strict=True))
    assert UNKNOWN_ANSWER in answers and len(set(answers)) > 10


def test_small_tasks_have_right_answers() -> None:
    rng = random.Random(13)
    for _ in range(200):
        counted = [int(number) for number in counting(rng).messages[1]["content"].split(", ")]
        step = counted[1] - counted[0]
        assert step in (1, -1) and counted == list(range(counted[0], counted[-1] + step, step))
        copied = copying(rng).messages
        assert copied[1]["content"] in copied[0]["content"]
        made = json_object(rng).messages
        assert all(key in made[0]["content"] for key in json.loads(made[1]["content"]))


def test_every_fact_has_many_wordings_and_a_held_out_one() -> None:
    rng = random.Random(14)
    per_fact = Counter(question.fact_id for question in held_out_questions())
    assert per_fact == {fact["id"]: 1 for fact in facts()}
    for fact in facts():
        assert len({fact_question(fact, rng) for _ in range(60)}) >= 30


def test_held_out_wordings_are_never_trained_on() -> None:
    held_out = {question.text.lower().strip(" ?") for question in held_out_questions()}
    rng = random.Random(15)
    for fact in facts():
        asked = {fact_question(fact, rng).lower().strip(" ?") for _ in range(150)}
        assert not asked & held_out
    assert not {question_of(document).lower().strip(" ?") for document in DOCUMENTS} & held_out


def test_questions_of_the_exam_are_no_whole_questions_of_the_corpus() -> None:
    """Patterns may make the simplest of them by chance. Three are too usual to leave out; two begin conversations."""
    files = [read_toml("asked.toml"), read_toml("reserved.toml")]
    blocks = [block for file in files for kind in ("asked", "declined") for block in file[kind].values()]
    written = [line for block in blocks for line in block.splitlines()] + [q.text for q in usual_questions()]
    followed = read_toml("follow_ups.toml")["follow_ups"].values()
    written += [line.partition(": ")[2] for block in followed for line in block.splitlines()]
    common = {"how do i change the port", "what is pagewick", "who are you"}
    exam = load_exam()
    in_exam = {
        text.lower().strip(" ?.") for topic in (*exam.facts, *exam.unknowable) for c in topic.asked for text in c
    }
    assert in_exam & {text.lower().strip(" ?.") for text in written} == common


def test_questions_that_the_readme_the_page_and_the_commands_print_are_learnt_word_for_word() -> None:
    source = (ROOT / "pagewick" / "server" / "page" / "models.js").read_text(encoding="utf-8")
    block = source.partition("BUILT_IN_EXAMPLES = [")[2].partition("]")[0]
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "pagewick/cli/complete.py")]
    quoted = [question for text in texts for question in re.findall(r'["|] ?([A-Z][^"?|]+\?)', text)]
    printed = {*re.findall(r'"([^"]+)"', block), QUESTION, *quoted}
    assert len(printed) >= 6, printed
    assert printed <= {question.text for question in usual_questions()}


def test_unrelated_questions_are_declined_and_leave_no_pattern_marks() -> None:
    assert all(is_refusal(answer) and "docs/" in answer for answer in (UNKNOWN_ANSWER, UNKNOWN_ABOUT_PAGEWICK))
    assert is_refusal(UNKNOWN_FLAG) and "--help" in UNKNOWN_FLAG
    rng = random.Random(16)
    for _ in range(2000):
        assert not set("{}<>|") & set(unrelated_question(rng))
    assert all(d.messages[-1]["content"] == UNKNOWN_ANSWER for d in DOCUMENTS if d.kind == "unrelated")


def test_unknown_questions_about_pagewick_are_declined_and_leave_no_pattern_marks() -> None:
    rng = random.Random(20)
    asked = [unknown_question(rng) for _ in range(2000)]
    assert not [text for text, _ in asked if set("{}<>|") & set(text)]
    assert {answer for _, answer in asked} == {UNKNOWN_ABOUT_PAGEWICK, UNKNOWN_FLAG}
    about_flags = [text for text, answer in asked if answer == UNKNOWN_FLAG]
    assert all("--" in text for text in about_flags)


def test_no_unknown_question_is_one_about_a_fact() -> None:
    """One question with two answers would teach the model to choose at random."""
    rng = random.Random(21)
    known_texts = {fact_question(fact, rng).lower().strip(" ?") for fact in facts() for _ in range(60)}
    declined = [unknown_question(rng)[0] for _ in range(4000)] + [unrelated_question(rng) for _ in range(4000)]
    assert sorted({text for text in declined if text.lower().strip(" ?") in known_texts}) == []


def test_few_wordings_belong_to_two_facts() -> None:
    rng = random.Random(22)
    answers: dict[str, set[str]] = {}
    for fact in facts():
        for _ in range(100):
            answers.setdefault(fact_question(fact, rng).lower().strip(" ?"), set()).add(fact["id"])
    ambiguous = {text: ids for text, ids in answers.items() if len(ids) > 1}
    assert len(ambiguous) <= 0.005 * len(answers), ambiguous


def test_wordings_leave_no_pattern_marks() -> None:
    rng = random.Random(17)
    for fact in facts():
        for _ in range(40):
            assert not set("{}<>|") & set(fact_question(fact, rng))


def test_expand_picks_alternatives_and_synonyms() -> None:
    rng = random.Random(18)
    seen = {expand("{a|b{c|d}} <verb> {|the }x?", {"verb": "go|run far"}, rng) for _ in range(300)}
    assert seen == {
        f"{first} {verb} {the}x?" for first in ("a", "bc", "bd") for verb in ("go", "run far") for the in ("", "the ")
    }


def test_disturbed_questions_keep_their_subject() -> None:
    rng = random.Random(19)
    texts = [disturb("which port does the server use by default?", rng).lower() for _ in range(300)]
    assert sum("port" in text for text in texts) >= 270
    assert len(set(texts)) >= 100
    assert with_typo("a b", rng) == "a b"
    assert with_typo("port", rng) != "port" or with_typo("port", rng) != "port"


def test_some_questions_are_disturbed_to_key_words() -> None:
    rng = random.Random(23)
    texts = {disturb("how do i change the port?", rng).lower().rstrip("?.! ") for _ in range(400)}
    assert "change port" in texts
    assert any(text.startswith(("could you", "please", "hello")) for text in texts)


def test_examples_learn_answers_alone_and_batches_hold_all() -> None:
    texts = ["".join(segment.text for segment in render(document)) for document in DOCUMENTS[:400]]
    tokenizer = train_tokenizer(texts, 1024)
    special_ids = encode_all(tokenizer, [*CONTROL_TOKENS, *MARKER_TOKENS])
    assert special_ids == [[index] for index in range(len(special_ids))]
    examples = encode_documents(tokenizer, DOCUMENTS[:60], 2048, random.Random(0))
    for document, example in zip(DOCUMENTS, examples, strict=False):
        learnt = tokenizer.decode([x for x in example.targets if x != UNLEARNT], skip_special_tokens=False)
        assert learnt == "".join(segment.text for segment in render(document) if segment.is_supervised)
    batches = list(micro_batches(examples))
    assert len(batches) > 1
    in_order = sorted(examples, key=lambda example: len(example.token_ids))
    found = ((batch, start) for batch in batches for start in batch.starts)
    for example, (batch, start) in zip(in_order, found, strict=True):
        rows = slice(start, start + len(example.token_ids))
        assert batch.input_ids[rows].tolist() == example.token_ids
        assert batch.targets[rows].tolist() == example.targets
        assert batch.positions[rows].tolist() == list(range(len(example.token_ids)))
    assert sum(int((batch.targets != UNLEARNT).sum()) for batch in batches) == sum(
        target != UNLEARNT for example in examples for target in example.targets
    )
    assert {len(batch.input_ids) % ROWS for batch in batches} == {0}


def test_an_example_in_a_batch_is_computed_as_alone() -> None:
    torch.manual_seed(0)
    config = NetworkConfig(vocab_size=50, hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    network = Network(config)
    texts = [torch.randint(0, 50, (length,)).tolist() for length in (1, 3, 13, 14, 15, 40, 41)]
    batch = to_micro_batch([Example(ids, ids) for ids in texts])
    assert 1 < len(batch.groups) < len(texts)
    together = network(batch)
    for ids, start in zip(texts, batch.starts, strict=True):
        alone = network(to_micro_batch([Example(ids, ids)]))
        assert torch.allclose(alone[: len(ids)], together[start : start + len(ids)], atol=1e-5)


def test_network_is_causal_and_has_the_attention_of_torch() -> None:
    torch.manual_seed(0)
    config = NetworkConfig(vocab_size=50, hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    network = Network(config)
    ids = torch.randint(0, 50, (13,)).tolist()
    changed = [*ids[:12], (ids[12] + 1) % 50]
    one, other = (network(to_micro_batch([Example(each, each)])) for each in (ids, changed))
    assert torch.allclose(one[:12], other[:12], atol=1e-5)
    assert not torch.allclose(one[12], other[12], atol=1e-3)
    attention = network.model.layers[0].self_attn
    q, k, v = torch.randn(13, 4, 64), torch.randn(13, 2, 64), torch.randn(13, 2, 64)
    group = Group(num_examples=1, length=13)
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True
    )
    assert torch.allclose(attention._attend(q, k, v, group), expected[0].transpose(0, 1).flatten(1), atol=1e-5)
