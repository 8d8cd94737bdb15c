"""A conversation becomes exactly the tokens that the template produces."""

from __future__ import annotations

import pytest

from nip_astra.errors import ContextLengthError, ModelLoadError
from nip_astra.language_models.sources import decode_all
from nip_astra.rollouts.messages import Turn
from nip_astra.scenario_base.conversation import tokens as tokens_module
from nip_astra.scenario_base.conversation.tokens import ChatFormat, PlainFormat
from tests.kit.messages import says
from tests.kit.tiny import make_tokenizer

TEXTS = ["hello", "how are you", "fine thanks .", "the cat sat"]


def _turns(chat: ChatFormat | PlainFormat, first_is_own: bool) -> list[Turn]:
    owners = [first_is_own, not first_is_own] * 2
    return [
        Turn("assistant" if own else "user", ids=chat.encode(text))
        for own, text in zip(owners, TEXTS, strict=True)
    ]


@pytest.mark.parametrize("first_is_own", [True, False])
def test_context_equals_the_rendered_template(first_is_own: bool) -> None:
    tokenizer = make_tokenizer()
    chat = ChatFormat(tokenizer)
    turns = _turns(chat, first_is_own)
    messages = [
        {"role": turn.role, "content": text} for turn, text in zip(turns, TEXTS, strict=True)
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.context(turns) == tokenizer.encode(text, add_special_tokens=False)


def test_kept_tokens_are_those_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "MAX_KEPT_TEXTS", 3)
    tokenizer = make_tokenizer()
    chat = ChatFormat(tokenizer)
    for texts in (TEXTS[:2], [*TEXTS, TEXTS[0]], TEXTS[1:2], TEXTS, []):
        expected = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        assert chat.encode_all(texts) == expected
        assert [chat.encode(text) for text in texts] == expected
        assert len(chat._ids_by_text) <= 3


def test_decoded_rows_are_those_of_the_tokenizer() -> None:
    tokenizer = make_tokenizer()
    rows = [tokenizer.encode(text) for text in TEXTS] + [[]]
    assert decode_all(tokenizer, rows) == tokenizer.batch_decode(rows, skip_special_tokens=True)


def test_a_tokenizer_that_decodes_in_its_own_way_is_used() -> None:
    class Loud(type(make_tokenizer())):
        def _decode(self, *args: object, **kwargs: object) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    tokenizer = make_tokenizer()
    tokenizer.__class__ = Loud
    assert decode_all(tokenizer, [tokenizer.encode("hello")]) == ["HELLO"]


@pytest.mark.parametrize("separator", [None, ".", "", "the cat"])
def test_the_last_turn_stays_as_sampled_and_is_located_in_its_context(
    separator: str | None,
) -> None:
    tokenizer = make_tokenizer()
    speech: ChatFormat | PlainFormat = ChatFormat(tokenizer)
    if separator is not None:
        speech = PlainFormat(tokenizer, separator=separator)
    # Unlike the tokenizer on any text: an unknown word in the middle.
    turns = [*_turns(speech, True), Turn("user", ids=(7, 1, 8))]
    fitted = speech.fit(turns, num_tokens=8)
    assert fitted.num_dropped_turns >= 3
    assert len(fitted.ids) <= 8
    for context in (speech.context(turns), fitted.ids):
        start, stop = speech.last_turn_span(turns, context)
        assert context[start:stop] == [7, 1, 8]
        # The tokenizer puts no token before a text: without one, the first would have no context.
        assert start >= 1
    with pytest.raises(ContextLengthError, match="window"):
        speech.fit(turns, num_tokens=3)


def test_a_long_conversation_loses_its_oldest_whole_turns() -> None:
    tokenizer = make_tokenizer()
    chat = ChatFormat(tokenizer)
    turns = _turns(chat, True)
    whole = chat.fit(turns, num_tokens=200)
    assert whole.num_dropped_turns == 0
    cut = chat.fit(turns, num_tokens=len(whole.ids) - 1)
    assert cut.num_dropped_turns == 1
    assert cut.ids == chat.context(turns[1:])
    with pytest.raises(ContextLengthError, match="leaves 3 tokens"):
        chat.fit(turns, num_tokens=3)


def test_a_preamble_lets_the_user_speak_first_and_a_refused_system_role_is_explained() -> None:
    tokenizer = make_tokenizer()
    chat = ChatFormat(tokenizer, preamble="hello")
    ids = chat.context(
        [Turn("assistant", ids=chat.encode("good day")), Turn("user", ids=chat.encode("fine"))]
    )
    assert tokenizer.decode(ids).startswith("<bos> <user> hello <end> <assistant> good day")
    chat = ChatFormat(tokenizer, system_prompt="be good")
    with pytest.raises(ModelLoadError, match=r"no system role here.*remove system_prompt"):
        chat.context([Turn("user", ids=(7,))])


def test_a_tokenizer_without_template_or_first_token_is_refused_where_it_needs_one() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ModelLoadError, match="format: plain"):
        ChatFormat(tokenizer)
    with pytest.raises(ModelLoadError, match="turn_separator"):
        PlainFormat(tokenizer, separator="")


def test_plain_turns_stand_one_after_the_other() -> None:
    tokenizer = make_tokenizer()
    plain = PlainFormat(tokenizer, separator=".")
    turns = [Turn("user", ids=plain.encode("hello")), Turn("assistant", ids=plain.encode("fine"))]
    assert tokenizer.decode(plain.context(turns)) == "hello . fine ."
    assert plain.end_ids == tuple(tokenizer.encode(".", add_special_tokens=False))


def test_a_separator_without_tokens_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    plain, without = (PlainFormat(make_tokenizer(), separator=text) for text in ("\n", ""))
    assert says(caplog.text, "turn_separator", "'<end>'")
    assert plain.context(_turns(plain, True)) == without.context(_turns(plain, True))


def test_a_given_turn_ends_like_a_turn_of_the_template() -> None:
    """Not with the smallest of the end-of-turn tokens, since Qwen2.5 and Llama 3 have several."""
    tokenizer = make_tokenizer()
    end, user, pad = tokenizer.convert_tokens_to_ids(["<end>", "<user>", "<pad>"])
    chat = ChatFormat(tokenizer)
    assert pad < end < user
    assert chat.turn_end((pad, end, user)) == (end,)
    assert chat.turn_end((end,)) == (end,)
    # A template that names none of them: the tokenizer's own end token, then any.
    assert chat.turn_end((pad, user)) == (pad,)
    tokenizer.chat_template = tokenizer.chat_template.replace("<end>", "<user>")
    assert ChatFormat(tokenizer).turn_end((pad, end, user)) == (user,)
    assert PlainFormat(tokenizer, separator="").turn_end((pad, end)) == (end,)
    plain = PlainFormat(tokenizer, separator=".")
    assert plain.turn_end((pad, end)) == plain.end_ids
