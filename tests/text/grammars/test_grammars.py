"""Finished responses have their form, whatever the model; and what cannot be honoured is refused by name, and soon."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from pagewick import LLM, SamplingParams
from pagewick.cli.random_model import SHAPES, write_random_model
from pagewick.engine.messages import EngineStats
from pagewick.errors import InvalidRequestError
from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.grammars.checker import GrammarChecker
from pagewick.text.grammars.constraint import GrammarCompiler, GrammarConstraint
from pagewick.text.grammars.grammar import Grammar, grammar_of, whole_grammar
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.grammars.vocabulary import make_vocabulary, special_tokens
from pagewick.text.reasoning import Reasoning, ReasoningTags, Stage
from pagewick.text.request_maker import RequestMaker
from pagewick.text.tokenizer import Tokenizer
from tests.text.grammars.hostile import HOSTILE
from tests.text.grammars.schemas import SCHEMAS
from tests.text.tokenizers.kinds import KINDS

IS_DEEP = bool(os.environ.get("PAGEWICK_DEEP"))
TOKENIZER = Tokenizer.from_directory(Path(__file__).parents[3] / "pagewick/demo/model")
COMPILER = GrammarCompiler(lambda: TOKENIZER, 1000)
SIZE = TOKENIZER.vocab_size
LIMITS = GrammarLimits()
# Not FormatChecker(): its times are those of draft 3.
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
# A slow machine must not fail a good grammar; tests of the limit set it.
PATIENT = GrammarLimits(timeout_s=60)


def constraint(grammar: str, **changes: Any) -> GrammarConstraint:
    said = {"type": "grammar", "grammar": grammar, **changes}
    return COMPILER.constraint(said, SIZE, TOKENIZER.eos_token_ids)


def allowed(of: GrammarConstraint) -> list[int]:
    bits = int.from_bytes(of.allowed_mask(), "little")
    return [place for place, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]


def written(of: GrammarConstraint, seed: int = 0, max_tokens: int = 600) -> str | None:
    """The response of a model that writes any allowed token; None if it does not end."""
    chosen, tokens = random.Random(seed), []
    for _ in range(max_tokens):
        if of.is_complete:
            break
        choices = allowed(of)
        assert choices, "a grammar always allows something"
        token = chosen.choice([token for token in choices if token in TOKENIZER.eos_token_ids] or choices)
        if token in TOKENIZER.eos_token_ids:
            break
        of.accept(token)
        tokens.append(token)
    else:
        return None
    return b"".join(map(TOKENIZER.token_bytes, tokens)).decode()


def form(**given: Any) -> str:
    return whole_grammar(grammar_of(StructuredOutputsParams(**given), LIMITS), None)


@pytest.fixture(scope="module")
def maker() -> Iterator[RequestMaker]:
    made = RequestMaker(TOKENIZER, None, SIZE, limits=PATIENT)
    yield made
    made.close()


def check(maker: RequestMaker, **given: Any) -> None:
    maker.prepare(maker.plan(SamplingParams(structured_outputs=given)))


def test_there_are_schemas_of_all_families() -> None:
    assert len({json.dumps(schema) for schema in SCHEMAS}) >= 200


@pytest.mark.parametrize("schema", SCHEMAS if IS_DEEP else SCHEMAS[::3], ids=lambda schema: json.dumps(schema)[:60])
def test_a_finished_response_validates(schema: Any) -> None:
    num_finished = 0
    for seed in range(5 if IS_DEEP else 2):
        text = written(constraint(form(json=schema)), seed)
        if text is not None:
            jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
            num_finished += 1
    assert num_finished, "no response came to its end"


@pytest.mark.skipif(not IS_DEEP, reason="takes minutes")
@pytest.mark.parametrize("weights", ["built-in", "random"])
def test_responses_of_models_validate(weights: str, tmp_path: Path) -> None:
    """A model with random weights writes some strings without an end."""
    if weights == "random":
        write_random_model(SHAPES["qwen3-tiny"], tmp_path)
    with LLM(model=str(tmp_path) if weights == "random" else None, max_model_len=512) as llm:
        params = [
            SamplingParams(max_tokens=400, temperature=1, seed=1, structured_outputs={"json": schema})
            for schema in SCHEMAS
        ]
        conversations = [[{"role": "user", "content": "Tell me something."}]] * len(params)
        outputs = [output.outputs[0] for output in llm.chat(conversations, params)]
    finished = [(schema, one.text) for schema, one in zip(SCHEMAS, outputs, strict=True) if one.finish_reason == "stop"]
    print(f"{weights} weights: {len(finished)} of {len(SCHEMAS)} responses came to their end")
    assert len(finished) > (0.9 if weights == "built-in" else 0.7) * len(SCHEMAS)
    for schema, text in finished:
        jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)


def test_the_python_api_holds_responses_to_their_form() -> None:
    """Also with several choices, draft tokens, log-probabilities, stop strings, and a request without a form."""
    code = {"regex": "[a-c]{2}-[0-9]{3}y"}
    given: list[dict[str, Any]] = [
        {"structured_outputs": code, "n": 2, "logprobs": 1},
        {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"],
                                         "additionalProperties": False}}},
        {"structured_outputs": code, "stop": ["y"]},
        {"ignore_eos": True},
    ]  # fmt: skip
    with LLM(max_model_len=256, speculative_method="ngram") as llm:
        params = [SamplingParams(max_tokens=40, temperature=1, seed=place, **one) for place, one in enumerate(given)]
        outputs = llm.generate(["Tell me a code:"] * len(params), params)
    texts = [[one.text for one in output.outputs] for output in outputs]
    assert len(texts[0]) == 2 and all(re.fullmatch(code["regex"], text) for text in texts[0])
    assert json.loads(*texts[1]) == {"a": 7} and re.fullmatch("[a-c]{2}-[0-9]{3}", *texts[2])
    assert [one.finish_reason for output in outputs for one in output.outputs] == ["stop"] * 4 + ["length"]
    assert all(len(one.logprobs or ()) == len(one.token_ids) for one in outputs[0].outputs)


def test_the_example_of_the_documentation_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs/structured-output.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(program, names)
    jsonschema.validate(json.loads(capsys.readouterr().out), names["schema"])


@pytest.mark.parametrize(
    "name",
    [
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
        "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
        "$dynamicRef", "$recursiveRef", "divisibleBy", "disallow", "extends",
    ],
)  # fmt: skip
def test_keywords_that_are_not_supported_are_named(maker: RequestMaker, name: str) -> None:
    values = {"uniqueItems": True, "minContains": 1, "maxContains": 1, "dependentRequired": {"a": ["b"]},
              "$dynamicRef": "#a", "$recursiveRef": "#", "dependentSchemas": {"a": {}}, "dependencies": {"a": ["b"]},
              "divisibleBy": 2, "disallow": "string", "x-guidance": {"lenient": True}}  # fmt: skip
    schema = {"type": "object", "properties": {"a": {name: values.get(name, {"type": "null"})}}, "required": ["a"],
              "x-guidance": {"lenient": True}}  # fmt: skip
    with pytest.raises(InvalidRequestError) as caught:
        check(maker, json=schema)
    assert name in str(caught.value) and caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "given",
    [
        {"json": {"$ref": "#"}},
        {"json": {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}},
        {"grammar": "root ::= root"},
        {"regex": r"[^\x00-\x{10FFFF}]"},
    ],
)
def test_a_form_that_no_text_has_is_refused(maker: RequestMaker, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot be honoured: no text fits it \(a rule or \$ref that only"):
        check(maker, **given)


TAGS: dict[str, Any] = {"structures": [{"begin": "<f=a>", "schema": {"const": 7}, "end": "</f>"}], "triggers": ["<f="]}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"regex": "[0-9{4}"}, "the regular expression [0-9{4} is wrong: unclosed character class"),
        ({"regex": "(?=a)b"}, "(?=a)b is wrong: look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": "x\n(a"}, "is wrong: unclosed group"),
        ({"regex": r"(a)\1"}, "is wrong: backreferences are not supported"),
        ({"regex": "a" * 400 + "[b"}, f"{'a' * 100}... is wrong: unclosed character class"),
        ({"regex": r"\b" + "x" * 400}, rf"the regular expression \b{'x' * 98}... is wrong: lookarounds not supported"),
        ({"grammar": "root ::= []"}, "the regular expression [] is wrong: unclosed character class"),
        ({"grammar": "start: X\nX: /a{2,1}/"}, "is wrong: invalid repetition count range, the start must be"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"json": {"pattern": "a|\n(?=b)"}}, "is wrong: look-around"),
        ({"json": {"patternProperties": {"[a": {}}}}, "the regular expression [a is wrong: unclosed character class"),
        ({"json": {}, "whitespace_pattern": "*"}, "* is wrong: repetition operator missing expression"),
        ({"structural_tag": {"format": {"type": "regex", "pattern": "(a"}}}, "(a is wrong: unclosed group"),
        ({"structural_tag": {**TAGS, "stop": 1}}, "the unknown field 'stop'; leave it out, or give one of"),
        ({"structural_tag": {**TAGS, "structures": [{**TAGS["structures"][0], "schma": {}, "x": 1}]}},
         "the unknown field 'x' in structures; leave it out, or give one of begin, end, schema"),
        ({"structural_tag": {"format": {"type": "or", "elements": [{"type": "any_text", "excludes": ["a"]}]}}},
         "the unknown field 'excludes' in a format of type any_text; leave it out, or give one of type"),
        ({"structural_tag": {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [
            {"begin": "<a", "content": {"type": "any_text"}, "end": ">", "z": 1}]}}},
         "the unknown field 'z' in tags; leave it out, or give one of begin, content, end, type"),
        ({"regex": "a\ud800"}, "it has half of a surrogate pair"),
        ({"grammar": 'root ::= "\udfff"'}, "it has half of a surrogate pair"),
        ({"grammar": 'start: "\udfff"'}, "it has half of a surrogate pair"),
        ({"structural_tag": {"format": {"type": "regex", "pattern": "\ud800"}}}, "it has half of a surrogate pair"),
        ({"choice": ["\ud800"]}, "is not a Unicode scalar value"),
        ({"json": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}, "alternatives of oneOf must exclude each other"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_refusal_has_its_reason(maker: RequestMaker, given: dict[str, Any], reason: str) -> None:
    """In the API process, and in the engine's, which compiles the grammar for itself."""
    for refuse in (lambda: check(maker, **given), lambda: constraint(form(**given))):
        with pytest.raises(InvalidRequestError, match=re.escape(reason)) as caught:
            refuse()
        assert "coerce_one_of" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def strict_maker() -> Iterator[RequestMaker]:
    made = RequestMaker(TOKENIZER, None, SIZE, limits=LIMITS)
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_are_refused_or_served(strict_maker: RequestMaker, name: str) -> None:
    """The child process may die of them, and is given half a second; this process and the next grammar go on."""
    try:
        check(strict_maker, **HOSTILE[name])
    except InvalidRequestError as error:
        assert error.param == "structured_outputs" and len(str(error)) < 700


@pytest.mark.parametrize("regex", ["a{1000000000}|z", "b|a{1000000000}|[k-m]", "[0-9]|z{1000000000}"])
def test_responses_with_several_beginnings_are_tried(regex: str) -> None:
    checker = GrammarChecker({}, 10, 60)
    with pytest.raises(InvalidRequestError, match=r"p cannot be honoured: .*too many"):
        checker.check(form(regex=regex), "p")
    checker.close()


def test_a_grammar_that_becomes_too_complex_says_so() -> None:
    compiler = GrammarCompiler(lambda: TOKENIZER, 4)
    spec = {"type": "grammar", "grammar": form(regex="a{1000000000}"), "param": "guided_regex"}
    constraint = compiler.constraint(spec, SIZE, ())
    stats = EngineStats()
    with pytest.raises(InvalidRequestError, match=r"guided_regex became too complex .*: .*too many.*; write it with"):
        for _ in range(4):
            constraint.allowed_mask()
            constraint.accept(TOKENIZER.encode("a", add_special_tokens=False)[0])
    compiler.count_into(stats)
    assert stats.num_grammar_violations == 0


def test_the_checker_survives_its_process() -> None:
    maker = RequestMaker(TOKENIZER, None, SIZE, limits=PATIENT)
    with pytest.raises(InvalidRequestError, match="too deeply"):
        check(maker, **HOSTILE["deep left recursion"])
    check(maker, regex="ab")
    impatient = RequestMaker(TOKENIZER, None, SIZE, limits=GrammarLimits(timeout_s=0.01))
    with pytest.raises(InvalidRequestError, match=r"longer than 0.01 s \(--grammar-timeout\)"):
        check(impatient, **HOSTILE["6,000 properties"])
    for one in (maker, impatient):
        one.close()


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "[a-c]{2}/[0-9]+x"}, "[a-c]{2}/[0-9]+x"),
        ({"regex": "^ab$"}, "ab"),
        ({"choice": ["a/é", 'q"\\', "x\ny", "x"]}, 'a/é|q"\\\\|x\ny|x'),
        ({"grammar": 'root ::= "a" ("\\u00e9" | "\\u0041" | b)+ "\\u002d"\nb ::= [x-z\\u00e0]'}, "a[éAx-zà]+-"),
        ({"grammar": 'start: "a" /[0-9]{2}/'}, "a[0-9]{2}"),
        (
            {"structural_tag": {"format": {"type": "sequence", "elements": [
                {"type": "const_string", "value": "A"}, {"type": "tag", "begin": "<", "end": ">",
                 "content": {"type": "or", "elements": [{"type": "regex", "pattern": "[01]"},
                                                        {"type": "json_schema", "json_schema": {"const": None}}]}}]}}},
            "A<([01]|null)>",
        ),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_other_forms(maker: RequestMaker, given: dict[str, Any], pattern: str) -> None:
    check(maker, **given)
    for seed in range(4):
        text = written(constraint(form(**given)), seed, 5000)
        assert text is None or re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("text", "fits"),
    [("free text", True), ("a <f=a>7</f> b", True), ("<f=a>7</f><f=a>7</f>", True), ("<f=a>8", False), ("<f=b", False)],
)
def test_a_trigger_begins_a_tag(text: str, fits: bool) -> None:
    of = constraint(form(structural_tag=TAGS))
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if token not in allowed(of):
            assert not fits
            return
        of.accept(token)
    assert (TOKENIZER.eos_token_ids[0] in allowed(of)) is fits


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_reads_the_bytes_that_the_text_has(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(KINDS[kind].write(tmp_path / "model"))
    num_tokens = tokenizer.vocab_size + 3  # as of a model whose table is padded
    vocabulary = make_vocabulary(tokenizer, num_tokens)
    special = special_tokens(tokenizer)
    assert vocabulary.vocab_size == num_tokens + 1 and vocabulary.eos_token == num_tokens
    for token_id in range(tokenizer.vocab_size):
        assert vocabulary.is_special_token(token_id) is (token_id in special)
        if token_id not in special:
            content = tokenizer.token_bytes(token_id)
            # No text has this byte; llguidance writes tokens without bytes as their number.
            expected = f"<[{token_id}]>".encode() if content in (b"", b"\xff") else content
            assert vocabulary.decode_bytes([token_id]) == expected


@pytest.mark.parametrize(
    ("stage", "text", "fits"),
    [
        (Stage.AWAITED, "yes", True),
        (Stage.AWAITED, "<think>Well.</think>\n\nyes", True),
        (Stage.AWAITED, "<think>Well.</think>maybe", False),
        (Stage.AWAITED, "Well, yes", False),
        (Stage.OPENED, "Well.</think>\n\nyes", True),
        (Stage.INSIDE, "yes", False),
        (Stage.OVER, "yes", True),
        (Stage.OVER, "<think>Well.</think>yes", False),
    ],
)
@pytest.mark.parametrize("are_tokens", [True, False])
def test_the_form_begins_where_the_thoughts_end(stage: Stage, text: str, fits: bool, are_tokens: bool) -> None:
    tags = ReasoningTags.find(TOKENIZER, ["<think>" if are_tokens else "<thought>"])
    assert tags is not None and tags.are_tokens is are_tokens
    text = text.replace("think>", f"{tags.start[1:]}")
    lark = grammar_of(StructuredOutputsParams(choice=("yes", "no")), LIMITS).lark
    of = constraint(whole_grammar(Grammar(lark), Reasoning(tags, stage)))
    for token in TOKENIZER.encode_pieces(["", *re.split(r"(<[^>]*>)", text)]):
        if token not in allowed(of):
            assert not fits
            return
        of.accept(token)
    assert of.is_complete is fits


def test_groups_of_tokens_change_no_mask() -> None:
    lengths = {f"at most {n}": {"type": "string", "maxLength": n} for n in (1, 2, 5, 11, 40, 41)}
    schema = {"type": "object", "properties": {**lengths, "any": {"type": "string"}, "word": {"pattern": "^[a-z]{4}$"}}}
    schema["required"] = [*schema["properties"]]
    lark = form(json=schema)
    grouped = make_vocabulary(TOKENIZER, SIZE)
    matchers = [LLMatcher(vocabulary, lark) for vocabulary in (grouped, grouped.with_slices([]))]
    chosen = random.Random(5)
    for _ in range(400):
        masks = [matcher.compute_bitmask() for matcher in matchers]
        assert masks[0] == masks[1]
        bits = np.unpackbits(np.frombuffer(masks[0], np.uint8), bitorder="little")
        token = int(chosen.choice(np.flatnonzero(bits)))
        if token >= SIZE:  # the end
            break
        assert all(matcher.consume_token(token) for matcher in matchers)


def test_drafts_are_cut_where_the_grammar_ends_them() -> None:
    of = constraint(form(json={"type": "object", "properties": {"name": {"const": "x"}}, "required": ["name"]}))
    tokens = TOKENIZER.encode('{"name": "x", "y"', add_special_tokens=False)
    kept = of.keep_allowed([*tokens[:2], 0, *tokens[2:]])
    assert kept == tokens[: len(kept)] and kept
    masks = of.allowed_masks(kept)
    for token, mask in zip(kept, masks, strict=False):
        assert of.allowed_mask() == mask
        of.accept(token)
    assert of.allowed_mask() == masks[-1] and len(masks) == len(kept) + 1


def test_the_models_own_end_tokens_end_a_form() -> None:
    of = constraint(form(regex="a+"), stop_token_ids=[77])
    (token,) = TOKENIZER.encode("a", add_special_tokens=False)
    ends = {*TOKENIZER.eos_token_ids, 77}
    assert not ends & {*allowed(of)}
    of.accept(token)
    assert ends <= {*allowed(of)} and not of.is_complete
    ignoring = constraint(form(regex="a"), ignores_eos=True)
    ignoring.accept(token)
    assert ignoring.is_complete and not {*TOKENIZER.eos_token_ids} & {*allowed(ignoring)}


def test_a_token_against_the_grammar_is_our_own_mistake() -> None:
    of = constraint(form(regex="a"))
    with pytest.raises(RuntimeError, match="does not allow token 300"):
        of.accept(300)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of"),
        ({"json": {}, "regex": "a"}, "exactly one of"),
        ({"json_object": False}, "exactly one of"),
        ({"choice": []}, "1 to 10000 texts"),
        ({"regex": ""}, "regex must not be empty"),
        ({"grammar": ""}, "grammar must not be empty"),
        ({"json": ""}, "json must not be empty"),
        ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern must not be empty"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace applies to JSON, not to a regex"),
        ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern applies to JSON, not to a choice"),
        ({"choice": ["a", 3]}, "1 to 10000 texts"),
        ({"regex": 3}, "regex must be a text"),
        ({"jsn": {}}, "has no jsn"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "contradicts"),
    ],
    ids=str,
)
def test_wrong_values(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams(structured_outputs=given)


def test_a_field_of_vllm_without_a_meaning_here_is_accepted() -> None:
    given = {"json": {}, "regex": None, "disable_any_whitespace": False, "disable_fallback": True}
    params = SamplingParams(structured_outputs=given)
    assert params.structured_outputs == StructuredOutputsParams(json={})


def test_beams_take_no_form(maker: RequestMaker) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs cannot be combined with use_beam_search"):
        SamplingParams(structured_outputs={"regex": "a"}, use_beam_search=True, n=2)
    with pytest.raises(InvalidRequestError, match="tools cannot be combined with use_beam_search"):
        maker.plan(SamplingParams(use_beam_search=True, n=2), grammar=Grammar('start: "a"', param="tools"))


def test_a_busy_machine_makes_no_grammar_too_slow() -> None:
    """The time limit is one of processor time, so a process that has to wait keeps it."""
    checker = GrammarChecker({}, 10, 0.3)
    checker.check(form(regex="a"), "p")
    process = checker._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    goes_on = threading.Timer(0.6, process.send_signal, [signal.SIGCONT])
    goes_on.start()
    checker.check(form(regex="b"), "p")
    goes_on.join()
    checker.close()


def test_a_grammar_that_allows_an_excluded_beginning_is_refused() -> None:
    checker = GrammarChecker({}, 10, 60)
    checker.check(form(regex="<t.*"), "p")
    with pytest.raises(InvalidRequestError, match="p cannot be honoured: it allows responses that begin with '<tool>'"):
        checker.check(form(regex="<t.*"), "p", ("[x(", "<tool>"))
    checker.check(form(json={"type": "object"}), "p", ("[x(", "<tool>"))
    checker.close()


def test_a_checker_that_is_never_closed_leaves_no_process() -> None:
    checker = GrammarChecker({}, 10, 60)
    checker.check(form(regex="a"), "p")
    process = checker._process
    assert process is not None and process.poll() is None
    del checker
    gc.collect()
    assert process.returncode is not None
