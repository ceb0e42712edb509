from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.text.stops import ChoiceText, StopMatcher
from shared.text.tokenizer import Tokenizer

AB = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: the first end at which any stop string is complete, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(AB, max_size=8), stops=STOPS, include=st.booleans())
def test_however_text_arrives_it_ends_at_the_first_complete_stop(
    texts: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    shown, hit = "", None
    for text in texts:
        piece, hit = matcher.push(text)
        shown += piece
        if hit is not None:
            break
    else:
        shown += matcher.finish()
    assert (shown, hit) == reference("".join(texts), stops, include)


@settings(max_examples=80, deadline=None)
@given(texts=st.lists(AB, max_size=6), stops=STOPS)
def test_only_text_that_could_become_a_stop_is_held(texts: list[str], stops: list[str]) -> None:
    matcher, shown, seen = StopMatcher(stops), "", ""
    for text in texts:
        piece, hit = matcher.push(text)
        if hit is not None:
            return
        shown, seen = shown + piece, seen + text
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def run(tokenizer: Tokenizer, text: str, **options: object) -> tuple[str, int, str | None]:
    """Text, counted tokens and stop of a choice whose tokens come one by one."""
    choice = ChoiceText(tokenizer, **options)  # type: ignore[arg-type]
    shown, count = "", 0
    for token_id in tokenizer.encode_plain(text):
        piece = choice.push((token_id,))
        shown, count = shown + piece.text, count + piece.num_tokens
        if piece.stop is not None:
            return shown, count, piece.stop
    return shown + choice.finish(), count, None


def test_a_stop_ends_before_or_after_itself(chatml: Tokenizer) -> None:
    assert run(chatml, "one. two", stops=(". ",))[::2] == ("one", ". ")
    assert run(chatml, "one. two", stops=(". ",), include_stop=True)[::2] == ("one. ", ". ")
    assert run(chatml, "one.", stops=(". ",)) == ("one.", len(chatml.encode("one.")), None)


def test_a_batch_counts_its_tokens_up_to_the_one_that_hit(chatml: Tokenizer) -> None:
    ids = [i for char in "1234567" for i in chatml.encode(char)]
    piece = ChoiceText(chatml, stops=("45",)).push(ids)
    assert (piece.text, piece.num_tokens, piece.stop) == ("123", 5, "45")
    plain = ChoiceText(chatml).push(ids)
    assert (plain.text, plain.num_tokens, plain.stop) == ("1234567", 7, None)


def test_stops_count_only_beyond_min_tokens(chatml: Tokenizer) -> None:
    assert run(chatml, "12121", stops=("2",), min_tokens=1) == ("1", 2, "2")
    assert run(chatml, "12121", stops=("2",), min_tokens=2) == ("121", 4, "2")
    assert run(chatml, "12121", stops=("2",), min_tokens=4) == ("12121", 5, None)


def test_the_closing_token_has_no_text(chatml: Tokenizer) -> None:
    one, two = chatml.encode("1"), chatml.encode("2")
    for stops in ((), ("9",)):
        assert ChoiceText(chatml, stops=stops).push([*one, *two], closed=True).text == "1"
        including = ChoiceText(chatml, stops=stops, include_stop=True)
        piece = including.push([*one, *two], closed=True)
        assert (piece.text, piece.num_tokens) == ("12", 2)


def test_special_tokens_are_shown_on_request(chatml: Tokenizer) -> None:
    ids = chatml.encode("a<|im_start|>b")
    assert ChoiceText(chatml).push(ids).text == "ab"
    assert ChoiceText(chatml, skip_special_tokens=False).push(ids).text == "a<|im_start|>b"


def test_text_held_for_a_stop_and_an_unfinished_character_come_out_at_the_end(chatml: Tokenizer) -> None:
    choice = ChoiceText(chatml, stops=("stop",))
    assert choice.push(chatml.encode("sto") + chatml.encode("\u65e5")[:1]).text == ""
    assert choice.finish() == "sto\ufffd"
