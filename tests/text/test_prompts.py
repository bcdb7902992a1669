"""Prompts of all kinds: texts, conversations with various ends, infill; and decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from pagewick.errors import ContextLengthError, InvalidRequestError
from pagewick.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from pagewick.text.infill import KNOWN_INFILL_TOKENS, Infill, OtherFile
from pagewick.text.prompts import MAX_CACHED_TEMPLATES, PromptEncoder
from pagewick.text.tokenizer import Tokenizer
from tests.tiny_text import (
    LLAMA_TEMPLATE,
    MISTRAL_TEMPLATE,
    QWEN_TEMPLATE,
    byte_level_backend,
    sentencepiece_backend,
    write_model_directory,
)

TOKENIZER = Tokenizer(byte_level_backend(), config={"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
BOS = TOKENIZER.encode("<s>", add_special_tokens=False)
MAX_LEN = 61
ASK = {"role": "user", "content": "hello"}


def encoder(template: str | None = QWEN_TEMPLATE, tokenizer: Tokenizer = TOKENIZER) -> PromptEncoder:
    chat_template = None if template is None else ChatTemplate({"default": template}, tokenizer)
    return PromptEncoder(tokenizer, chat_template, max_model_len=MAX_LEN)


PROMPTS = encoder()


def plain(text: str, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_special_tokens_around_a_text_can_be_left_out() -> None:
    assert PROMPTS.encode("hello") == BOS + plain("hello")
    assert PROMPTS.encode("hello", add_special_tokens=False) == plain("hello")


def test_special_tokens_around_a_conversation_come_once() -> None:
    rendered = PROMPTS.render_chat([ASK])
    assert PROMPTS.encode_rendered(rendered) == plain(rendered.text)
    assert PROMPTS.encode_rendered(rendered, add_special_tokens=True) == BOS + plain(rendered.text)
    written = PROMPTS.render_chat([ASK], chat_template="<s>{{ messages[0].content }}")
    assert PROMPTS.encode_rendered(written, add_special_tokens=True) == BOS + plain("hello")


LONG = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.mark.parametrize("num_kept", [1, 7, 61, 100, 10**9])
def test_the_last_tokens_are_kept(num_kept: int) -> None:
    whole = TOKENIZER.encode(LONG, add_special_tokens=True)
    assert PROMPTS.encode(LONG, truncate_prompt_tokens=num_kept) == whole[max(0, len(whole) - num_kept) :]
    rendered = PROMPTS.render_chat([{"role": "user", "content": LONG}])
    chat = plain(rendered.text)
    assert PROMPTS.encode_rendered(rendered, truncate_prompt_tokens=num_kept) == chat[max(0, len(chat) - num_kept) :]


def test_as_many_as_fit_are_kept() -> None:
    whole = TOKENIZER.encode(LONG, add_special_tokens=True)
    assert PROMPTS.encode(LONG, truncate_prompt_tokens=-1) == whole[-MAX_LEN + 1 :]
    assert PROMPTS.encode(LONG, truncate_prompt_tokens=-1, num_output_tokens=20) == whole[-MAX_LEN + 20 :]
    assert PROMPTS.encode(LONG, truncate_prompt_tokens=-1, num_output_tokens=10**6) == whole[-1:]
    assert PROMPTS.encode("hello", truncate_prompt_tokens=-1) == BOS + plain("hello")


def test_what_is_not_cut_is_refused_unread() -> None:
    with pytest.raises(ContextLengthError):
        PROMPTS.encode("x" * 100_000)
    assert len(PROMPTS.encode("x" * 100_000, truncate_prompt_tokens=3)) == 3


@pytest.mark.parametrize("num_kept", [1, 5, 50, 10**9])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_the_last_tokens_of_cut_text_are_kept(num_kept: int, add_special_tokens: bool) -> None:
    rendered = PROMPTS.render_chat([{"role": "user", "content": "<|im_end|>" * 20}])
    assert len(rendered.pieces) > 20
    whole = (BOS if add_special_tokens else []) + TOKENIZER.encode_pieces(rendered.pieces)
    kept = PROMPTS.encode_rendered(rendered, truncate_prompt_tokens=num_kept, add_special_tokens=add_special_tokens)
    assert kept == whole[max(0, len(whole) - num_kept) :]


def test_a_context_that_changes_is_followed() -> None:
    """A restarted engine may have memory for a shorter context than before."""
    lengths = [MAX_LEN]
    prompts = PromptEncoder(TOKENIZER, None, max_model_len=lambda: lengths[-1])
    whole = plain(LONG)
    for max_len in (MAX_LEN, 19):
        lengths.append(max_len)
        assert prompts.max_model_len == max_len
        kept = prompts.encode(LONG, add_special_tokens=False, truncate_prompt_tokens=-1)
        assert kept == whole[1 - max_len :]
    with pytest.raises(ContextLengthError, match="maximum context length is 19 tokens"):
        prompts.encode("x" * (19 * 16 + 1))


@pytest.mark.parametrize("wrong", [0, -2, 1.5, True, "3"])
def test_a_wrong_truncation_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be 1 or more, or -1") as caught:
        PROMPTS.encode("hello", truncate_prompt_tokens=wrong)
    assert caught.value.param == "truncate_prompt_tokens"


# Conversations


ANSWERS = ["Well, ", "Well", " \n Well, it is\n\n", "<think>\nhm\n</think>\n\nSo", "{{ x }} é😀"]


@pytest.mark.parametrize("source", [QWEN_TEMPLATE, LLAMA_TEMPLATE, MISTRAL_TEMPLATE], ids=["qwen", "llama", "mistral"])
@pytest.mark.parametrize("content", ANSWERS)
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_message_is_continued_as_by_transformers(tmp_path: Path, source: str, content: str, role: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference for chat templates")
    write_model_directory(tmp_path, byte_level_backend(), chat_template=source)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [ASK, {"role": role, "content": content}]
    try:
        expected = reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    except Exception:
        with pytest.raises(InvalidRequestError):
            encoder(source).render_chat(messages, continue_final_message=True)
        return
    assert encoder(source).render_chat(messages, continue_final_message=True).text == expected


def test_only_a_text_can_be_continued() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    for messages in ([], [ASK, call]):
        with pytest.raises(InvalidRequestError, match="needs a last message with text") as caught:
            PROMPTS.render_chat(messages, continue_final_message=True)
        assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "source", ["{{ messages[0].role }}", "{{ messages[0].content * 2 }}", "{{ messages[0].content[:2] }}"]
)
def test_what_a_template_mangles_cannot_be_continued(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="changes the text of the last message") as caught:
        PROMPTS.render_chat([ASK], continue_final_message=True, chat_template=source)
    assert caught.value.param == "continue_final_message"


def test_a_continued_message_is_cut_like_any_other() -> None:
    messages = [{"role": "assistant", "content": "a<|im_end|>b"}]
    token_ids = PROMPTS.encode_rendered(PROMPTS.render_chat(messages, continue_final_message=True))
    assert plain("<|im_end|>")[0] not in token_ids
    assert PROMPTS.decode(token_ids).endswith("assistant\na<|im_end|>b")


def test_a_generation_prompt_is_not_added_to_a_continued_message() -> None:
    for adds in (True, False):
        text = PROMPTS.render_chat([ASK], continue_final_message=True, add_generation_prompt=adds).text
        assert text == "<|im_start|>user\nhello"


def test_documents_reach_the_template() -> None:
    source = "{{ documents is defined }}{% for d in documents or [] %}|{{ d.title }}{% endfor %}"
    assert PROMPTS.render_chat([ASK], chat_template=source).text == "True"
    documents = [{"title": "a"}, {"title": "<|im_end|>"}]
    rendered = PROMPTS.render_chat([ASK], chat_template=source, documents=documents)
    assert rendered.text == "True|a|<|im_end|>"
    assert plain("<|im_end|>")[0] not in PROMPTS.encode_rendered(rendered)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_that_are_sent_back_have_either_name(name: str) -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}{{ m['reasoning'] }}|{% endfor %}"
    messages = [{"role": "assistant", "content": "x", name: "hm"}]
    assert PROMPTS.render_chat(messages, chat_template=source).text == "hmhm|"
    both = [{"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}]
    assert PROMPTS.render_chat(both, chat_template=source).text == "ba|"


def test_a_requests_template_takes_the_models_place() -> None:
    assert PROMPTS.render_chat([ASK], chat_template="[{{ messages[0].content }}]").text == "[hello]"
    assert encoder(None).render_chat([ASK], chat_template="{{ x }}", chat_template_kwargs={"x": 3}).text == "3"
    with pytest.raises(InvalidRequestError, match=r"no chat template\..* --chat-template FILE") as caught:
        encoder(None).render_chat([ASK])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 1 +", "{{ x | nofilter }}", "(" * 9 + "{{" + "(" * 5000, "x" * (MAX_TEMPLATE_CHARS + 1)]
)
def test_a_requests_template_is_checked(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"chat template is (longer|not valid)") as caught:
        PROMPTS.render_chat([ASK], chat_template=source)
    assert caught.value.param == "chat_template"


def test_a_requests_template_is_in_the_sandbox() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}{% endfor %}", "{{ 'a' * 10**9 }}"):
        with pytest.raises(InvalidRequestError):
            PROMPTS.render_chat([ASK], chat_template=source)


def test_a_few_templates_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, num_made = encoder(), []
    original = ChatTemplate.__init__

    def count(self: ChatTemplate, *given: Any) -> None:
        num_made.append(1)
        original(self, *given)

    monkeypatch.setattr(ChatTemplate, "__init__", count)
    sources = [f"{number}" for number in range(MAX_CACHED_TEMPLATES)]
    for source in sources * 3:
        assert prompts.render_chat([ASK], chat_template=source).text == source
    assert len(num_made) == MAX_CACHED_TEMPLATES
    prompts.render_chat([ASK], chat_template="one more")
    prompts.render_chat([ASK], chat_template=sources[0])
    assert len(num_made) == MAX_CACHED_TEMPLATES + 2


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "documents"])
def test_variables_that_have_a_place_of_their_own_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"must not set {name}"):
        PROMPTS.render_chat([ASK], chat_template_kwargs={name: []})


def test_thinking_can_be_switched_where_the_template_asks() -> None:
    assert PROMPTS.can_think_by_switch
    assert not encoder(LLAMA_TEMPLATE).can_think_by_switch and not encoder(None).can_think_by_switch
    source = "{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}"
    prompts = encoder(source)
    assert prompts.can_think_by_switch
    for name in ("enable_thinking", "thinking"):
        for value, expected in ((True, "<think>"), (False, "</think>")):
            assert prompts.render_chat([ASK], chat_template_kwargs={name: value}).text == expected
    # A variable that the template sets itself does not count.
    assert not encoder("{% set enable_thinking = 1 %}{{ enable_thinking }}").can_think_by_switch


def test_reasoning_tags_are_those_of_the_template_or_the_vocabulary() -> None:
    assert PROMPTS.reasoning_tags is not None and PROMPTS.reasoning_tags.start == "<think>"
    found = encoder("{{ '<reasoning>' }}").reasoning_tags
    assert found is not None and found.start == "<reasoning>"
    assert encoder(None).reasoning_tags == PROMPTS.reasoning_tags
    assert encoder(None, Tokenizer(sentencepiece_backend(), config={})).reasoning_tags is None


# Gaps


@pytest.mark.parametrize("names", KNOWN_INFILL_TOKENS)
@pytest.mark.parametrize(
    ("prefix", "suffix"), [("def f(", "):\n"), ("", "x"), ("a ", ""), (" é", " 😀"), ("</s>", "<s>")]
)
def test_a_gap_is_between_its_tokens(names: tuple[str, str, str | None], prefix: str, suffix: str) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens([name for name in names if name])
    tokenizer = Tokenizer(backend, config={"bos_token": "<s>", "add_bos_token": True})
    token_ids = encoder(None, tokenizer).encode_infill(Infill(prefix, suffix))
    ids = [plain(name, tokenizer)[0] for name in names if name]
    places = [token_ids.index(one) for one in ids]
    assert [token_ids.count(one) for one in ids] == [1] * len(ids)
    if names[2] is not None:
        assert places == sorted(places) and (places[0], places[2]) == (1, len(token_ids) - 1)
        parts = token_ids[2 : places[1]], token_ids[places[1] + 1 : -1]
    else:
        assert places[1] == 1
        parts = token_ids[places[0] + 1 :], token_ids[2 : places[0]]
    assert [tokenizer.decode(part, skip_special_tokens=False) for part in parts] == [prefix, suffix]
    # A user must not be able to write the tags that mark the model's own words.
    assert token_ids[0] == BOS[0] and not {*parts[0], *parts[1]} & tokenizer.special_token_ids


def test_a_sentencepiece_suffix_gets_no_space() -> None:
    backend = sentencepiece_backend()
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<PRE>", "<SUF>", "<MID>")])
    tokenizer = Tokenizer(backend, config={})
    token_ids = encoder(None, tokenizer).encode_infill(Infill("hello", "hello"))
    words = [tokenizer.token_bytes(token_id).decode() for token_id in token_ids]
    assert words == ["<PRE>", " hello", "<SUF>", *words[3:-1], "<MID>"]
    assert "".join(words[3:-1]) == "hello"


@pytest.mark.parametrize("names", [("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ()])
def test_other_files_stand_before_a_gap(names: tuple[str, ...]) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>", *names])
    tokenizer = Tokenizer(backend, config={"bos_token": "<s>", "add_bos_token": True})
    files = [OtherFile("a.py", "A = 1</s>"), OtherFile("b.py", "B = 2")]
    token_ids = encoder(None, tokenizer).encode_infill(Infill("def f", "x", files, "(a"))
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    gap = "<fim_prefix>def f<fim_suffix>x<fim_middle>(a"
    if names:
        repository, file = names
        expected = f"{repository}repository\n{file}a.py\nA = 1</s>\n{file}b.py\nB = 2\n{file}file\n{gap}"
    else:
        expected = f"A = 1</s>\nB = 2\n{gap}"
    assert text == f"<s>{expected}"
    # The content of a file stays text, also if it looks like a token.
    assert tokenizer.id_of("</s>") not in token_ids


def test_not_every_model_fills_gaps() -> None:
    with pytest.raises(InvalidRequestError, match="cannot infill") as caught:
        PROMPTS.encode_infill(Infill("a", "b"))
    assert caught.value.param == "suffix"
    backend = byte_level_backend()
    backend.add_special_tokens(["<fim_prefix>", "<fim_suffix>"])
    with pytest.raises(InvalidRequestError, match="cannot infill"):
        encoder(None, Tokenizer(backend, config={})).encode_infill(Infill("a", "b"))


# Back to text


def test_tokens_become_text_again() -> None:
    text = "<|im_start|>hé😀<think>"
    assert PROMPTS.decode(plain(text)) == text
    assert PROMPTS.decode(plain(text), skip_special_tokens=True) == "hé😀<think>"
    assert PROMPTS.token_strings(plain("<|im_start|>a<think>")) == ["<|im_start|>", "a", "<think>"]
    assert PROMPTS.token_strings(plain("\u20ac")[:1]) == ["\ufffd"]
    assert (PROMPTS.decode([]), PROMPTS.token_strings([])) == ("", [])


@pytest.mark.parametrize("wrong", [[-1], [0, 10**9], [TOKENIZER.vocab_size]])
def test_unknown_tokens_are_refused(wrong: list[int]) -> None:
    for make in (PROMPTS.decode, PROMPTS.token_strings):
        with pytest.raises(InvalidRequestError, match=f"token id {wrong[-1]} is not in the vocabulary") as caught:
            make(wrong)
        assert caught.value.param == "tokens"
