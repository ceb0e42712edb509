from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from shared.text.detokenizer import ByteDetokenizer, WindowDetokenizer, make_detokenizer
from shared.text.token_bytes import build_byte_table, byte_level_alphabet
from shared.text.tokenizer import Tokenizer

CUTS = st.lists(st.integers(1, 4), max_size=40)


def pushed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, skip: bool) -> list[str]:
    """The pieces that a detokenizer gives for ids that arrive in batches of these sizes."""
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip)
    pieces, rest = [], list(ids)
    for cut in [*cuts, len(ids)]:
        pieces.append(detokenizer.push(rest[:cut]))
        rest = rest[cut:]
    return [*pieces, detokenizer.finish()]


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 400), max_size=40), cuts=CUTS, skip=st.booleans())
def test_byte_level_pieces_join_to_the_decoding_of_any_ids(
    chatml: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    text = "".join(pushed(chatml, ids, cuts, skip=skip))
    assert text == chatml.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30), cuts=CUTS)
def test_pieces_join_to_the_text_and_split_no_character(
    chatml: Tokenizer, fallback: Tokenizer, text: str, cuts: list[int]
) -> None:
    for tokenizer in (chatml, fallback):
        ids = tokenizer.encode_plain(text)
        pieces = pushed(tokenizer, ids, cuts, skip=False)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_held_then_marked(chatml: Tokenizer) -> None:
    ids = chatml.encode("\u65e5")
    detokenizer = make_detokenizer(chatml)
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_only_the_first_space_of_a_text_is_stripped(fallback: Tokenizer) -> None:
    hello = fallback.token_id("\u2581hello")
    assert hello is not None
    assert pushed(fallback, [hello, hello], [1], skip=True) == ["hello", " hello", ""]


def test_ids_of_padding_rows_have_no_text(chatml: Tokenizer) -> None:
    a = chatml.encode("a")
    assert "".join(pushed(chatml, [*a, 5000, *a], [3], skip=True)) == "aa"
    assert make_detokenizer(chatml).push((5000,)) == ""


def test_a_decoder_that_looks_at_neighbours_goes_by_window(wordpiece: Tokenizer) -> None:
    ids = wordpiece.encode("a unlikely story [SEP] a")
    assert isinstance(make_detokenizer(wordpiece), WindowDetokenizer)
    for skip in (True, False):
        pieces = pushed(wordpiece, ids, [1] * len(ids), skip=skip)
        assert "".join(pieces) == wordpiece.decode(ids, skip_special_tokens=skip)
    assert pushed(wordpiece, ids, [1] * 3, skip=True)[:3] == ["a", " un", "like"]


def test_window_and_table_agree(chatml: Tokenizer) -> None:
    ids = chatml.encode("What colour is \u65e5\u672c \U0001f600? <|im_end|>")
    window, table = WindowDetokenizer(chatml, True), make_detokenizer(chatml)
    assert isinstance(table, ByteDetokenizer)
    by_window = "".join([window.push((i,)) for i in ids] + [window.finish()])
    assert by_window == "".join([table.push((i,)) for i in ids] + [table.finish()])
    assert by_window == chatml.decode(ids)


def test_the_alphabet_covers_every_byte_once() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["a"] == 0x61
    assert alphabet["\u0120"] == 0x20


def test_only_known_decoders_get_a_table() -> None:
    vocab = {"a": 0}
    assert build_byte_table(None, vocab) is None
    for decoder in (
        decoders.WordPiece(),
        decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    ):
        backend = Backend(models.BPE())
        backend.decoder = decoder
        assert build_byte_table(json.loads(backend.to_str())["decoder"], vocab) is None
