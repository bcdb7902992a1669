"""Keywords whose exact meaning is hard to keep: what is accepted is valid where it is read, and the rest is refused."""

from __future__ import annotations

import json
import random
from datetime import date, datetime, time
from decimal import Decimal
from operator import ge, gt, le, lt
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pagewick.errors import InvalidRequestError
from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.grammars.grammar import grammar_of, whole_grammar
from pagewick.text.grammars.json_schema import prepared_schema
from pagewick.text.grammars.limits import GrammarLimits

VOCABULARY = LLTokenizer("byte")
LIMITS = GrammarLimits()


def matcher(schema: Any, **options: Any) -> LLMatcher:
    params = StructuredOutputsParams(json=schema, **options)
    made = LLMatcher(VOCABULARY, whole_grammar(grammar_of(params, LIMITS), None))
    assert not made.is_error(), made.get_error()
    return made


def accepts(made: LLMatcher, text: str) -> bool:
    made, token_ids = made.deep_copy(), VOCABULARY.tokenize_str(text)
    return made.try_consume_tokens(token_ids) == len(token_ids) and made.is_accepting()


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"const": 2**53 + 1}, "const"),
        ({"enum": ["a", 2**53 + 1]}, "enum"),
        ({"enum": [-(2**63)]}, "enum"),
        ({"const": {"a": [1, {"b": 2**64}]}}, "const"),
        ({"const": 0.1 + 0.2}, "const"),
        ({"enum": [1e22]}, "enum"),
        ({"type": "number", "multipleOf": 1 / 3}, "multipleOf"),
        ({"type": "integer", "maximum": 2**53 + 1}, "maximum"),
    ],
    ids=str,
)
def test_numbers_that_would_be_changed_are_refused(schema: Any, keyword: str) -> None:
    """Other programs have more digits than that in some numbers: a double has 17, an id of 64 bits 19."""
    for given in (schema, {"type": "array", "items": schema}):
        with pytest.raises(InvalidRequestError, match=rf"the keyword {keyword} at .* has a number beyond 2\*\*53"):
            matcher(given)


@pytest.mark.parametrize("value", [2**53, -(2**53), 0.1, -1.5e-7, 123456.789012345, 0, True, [1e15, {"a": -0.25}]])
def test_other_numbers_stay_as_they_are(value: Any) -> None:
    made, text = matcher({"const": value}, disable_any_whitespace=True), bytearray()
    while not made.is_stopped():
        mask = made.compute_bitmask()
        (token_id,) = [place for place in range(256) if mask[place // 8] >> place % 8 & 1]
        made.consume_token(token_id)
        text.append(token_id)
    assert json.loads(text) == value


def random_bounds(rng: random.Random) -> dict[str, float]:
    low: float = rng.choice([
        rng.uniform(-3, 3), round(rng.uniform(-9, 9), rng.randint(0, 4)), rng.randint(-20, 20), 0,
        rng.uniform(-1, 1) * 10 ** rng.randint(-6, 6),
    ])  # fmt: skip
    high: float = low + rng.choice([rng.uniform(0.1, 3), round(rng.uniform(0.1, 9), 2), rng.randint(1, 20)])
    return {rng.choice(["minimum", "exclusiveMinimum"]): low, rng.choice(["maximum", "exclusiveMaximum"]): high}


OPERATORS = {"minimum": ge, "exclusiveMinimum": gt, "maximum": le, "exclusiveMaximum": lt}


@pytest.mark.parametrize("seed", range(4))
def test_a_number_close_to_a_bound_is_within_it(seed: int) -> None:
    """As it is written; where it is read as a double, too, unless the bound is exclusive."""
    rng, num_accepted = random.Random(seed), 0
    for _ in range(60):
        bounds = random_bounds(rng)
        made = matcher({"type": "number", **bounds})
        for _ in range(12):
            near = Decimal(repr(rng.choice([*bounds.values()])))
            text = f"{near + rng.choice([0, 1, -1]) * Decimal(10) ** -rng.randint(1, 20):f}"
            if accepts(made, text):
                num_accepted += 1
                for name, bound in bounds.items():
                    assert OPERATORS[name](Decimal(text), Decimal(repr(bound))), (text, bounds)
                    assert name.startswith("exclusive") or OPERATORS[name](float(text), bound), (text, bounds)
    assert num_accepted > 150


def is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_a_date_is_a_day_of_the_calendar() -> None:
    made, rng = matcher({"type": "string", "format": "date"}), random.Random(1)
    years = [0, 1, 4, 100, 400, 1582, 1900, 1999, 2000, 2023, 2024, 2100, 9996, 9999]
    days = [f"{year:04}-02-{day}" for year in years for day in (28, 29, 30)]
    days += [f"{rng.randrange(10000):04}-{rng.randrange(14):02}-{rng.randrange(33):02}" for _ in range(800)]
    for text in days:
        assert accepts(made, f'"{text}"') is is_date(text), text
    assert not any(accepts(made, f'"{text}"') for text in ("2024-1-01", "20240101", "2024-01-01 ", "2024-W01-1"))


@pytest.mark.parametrize("text", ["00:00:00Z", "23:59:59.123456789+23:59", "12:30:00-00:00", "07:08:09.1Z"])
def test_times_of_rfc_3339(text: str) -> None:
    assert accepts(matcher({"type": "string", "format": "time"}), f'"{text}"')
    assert accepts(matcher({"type": "string", "format": "date-time"}), f'"2024-02-29T{text}"')
    assert time.fromisoformat(text) and datetime.fromisoformat(f"2024-02-29T{text}")


@pytest.mark.parametrize(
    "text", ["24:00:00Z", "10:00:60Z", "10:00Z", "10:00:00", "10:00:00+24:00", "10:60:00Z", "1:0:0Z"]
)
def test_times_that_are_none(text: str) -> None:
    assert not accepts(matcher({"type": "string", "format": "time"}), f'"{text}"')
    made = matcher({"type": "string", "format": "date-time"})
    assert not accepts(made, f'"2024-02-29T{text}"') and not accepts(made, '"1900-02-29T10:00:00Z"')


def test_a_format_and_other_keywords_for_the_same_value() -> None:
    schema = {"type": "string", "format": "date", "pattern": "-0[13]-", "allOf": [{"pattern": "^2"}]}
    made = matcher(schema)
    assert accepts(made, '"2024-03-31"')
    assert not any(accepts(made, f'"{text}"') for text in ("1024-03-31", "2024-02-01", "2024-03-32"))


# From RFC 1123, RFC 3339 (appendix A), RFC 3986, RFC 4122, RFC 4291 and RFC 5321.
FORMATS = {
    "hostname": (
        ["a", "a-b.c", "xn--4gbwdl.xn--wgbh1c", "1.2", ".".join(["a" * 63] * 3)],
        ["-a", "a-", "a..b", "a_b", "a" * 64, ".".join(["a" * 60] * 5)],
    ),
    "duration": (["P1Y", "PT1H2M3S", "P3W", "P1Y2M3DT4H"], ["P", "PT", "1Y", "P1YT", "P1W1D", "P1Y1D", "P1S"]),
    "uri": (["http://a.b/c?d=e#f", "urn:a:b", "mailto:a@b.c"], ["//a", "a", "http://a b", "http://a/%zz", "http://[::1"]),
    "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.0.0.0", "1.2.3", "1.2.3.4.5", "01.2.3.4"]),
    "ipv6": (["::", "::1", "1:2:3:4:5:6:7:8", "fe80::1"], ["1::2::3", "1:2:3:4:5:6:7", "12345::", "::%eth0"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "123e4567-e89b"]),
    "email": (["a@b.c", "a.b+c@d-e.org"], ["a", "@b", "a@", "a..b@c", ".a@b", "a b@c"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_other_formats(name: str) -> None:
    made, (right, wrong) = matcher({"type": "string", "format": name}), FORMATS[name]
    assert [text for text in right if not accepts(made, json.dumps(text))] == []
    assert [text for text in wrong if accepts(made, json.dumps(text))] == []


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("int8", [-128, 127], [-129, 128]),
        ("uint16", [0, 65535], [-1, 65536]),
        ("int32", [-(2**31), 2**31 - 1], [-(2**31) - 1, 2**31]),
        ("int64", [1234567890123456789, -5], [2**63, -(2**63) - 1]),
        ("uint64", [2**64 - 1], [-1]),
    ],
)
def test_formats_of_integers_are_ranges(name: str, right: list[int], wrong: list[int]) -> None:
    made = matcher({"type": "integer", "format": name})
    assert all(accepts(made, str(value)) for value in right) and not any(accepts(made, str(value)) for value in wrong)
    small = matcher({"type": "integer", "format": name, "minimum": 3, "maximum": 5})
    assert [value for value in range(9) if accepts(small, str(value))] == [3, 4, 5]


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False}, {"propertyNames": {"type": "string"}}, {"propertyNames": {}}, {"not": False},
        {"unevaluatedProperties": True}, {"unevaluatedItems": {}},
    ],
    ids=str,
)  # fmt: skip
def test_keywords_that_restrict_nothing_are_accepted(keywords: dict[str, Any]) -> None:
    """Generators of schemas write them."""
    assert accepts(matcher({"type": ["object", "array"], "maxItems": 2, "maxProperties": 1, **keywords}), "[1, 1]")


def test_properties_that_a_response_could_repeat_are_not_counted() -> None:
    """An object with the same name twice has one property where it is read."""
    free = {"type": "object", "additionalProperties": {"type": "integer"}}
    made = matcher({**free, "minProperties": 1})
    assert accepts(made, '{"a": 1}') and not accepts(made, "{}")
    named = {"properties": {"a": {"type": "null"}}, "required": ["a"]}
    assert accepts(matcher({**free, **named, "minProperties": 2}), '{"a": null, "b": 1}')
    for schema in ({**free, "minProperties": 2}, {**free, **named, "minProperties": 3}):
        with pytest.raises(InvalidRequestError, match="the keyword minProperties at the top asks for"):
            matcher(schema)


def test_a_lenient_schema_leaves_out_what_cannot_be_kept() -> None:
    wrong = {"type": "integer", "enum": [2**53 + 1]}
    schema = {"properties": {"a": wrong, "b": {"format": "date"}, "c": {"minimum": 2**60}}, "extends": {}}
    made = prepared_schema(schema, LIMITS, is_lenient=True)["properties"]
    assert made["a"] == {"type": "integer"} and made["c"] == {} and made["b"]["pattern"]
    with pytest.raises(InvalidRequestError, match=r"enum at \.?properties\.a"):
        prepared_schema({"properties": {"a": wrong}}, LIMITS)
