"""The block hash covers everything that KV bytes depend on, and nothing runs together."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv_cache.block_hash import BlockHasher, block_content, media_by_block
from shared.types.request import MediaItem
from tests.unit.kv_cache.kv_builders import IDENTITY, make_hasher

IDS = (1, 2, 3, 4)


def test_the_root_depends_on_every_identity_field_salt_and_adapter() -> None:
    roots = {make_hasher().root("", ""), make_hasher().root("s", ""), make_hasher().root("", "s")}
    for name in IDENTITY.__struct_fields__:
        other = msgspec.structs.replace(IDENTITY, **{name: "other"})
        roots.add(BlockHasher(other, 4).root("", ""))
    assert len(roots) == 3 + len(IDENTITY.__struct_fields__)


def test_fields_are_length_prefixed() -> None:
    hasher = make_hasher()
    assert hasher.root("ab", "c") != hasher.root("a", "bc")
    root = hasher.root("", "")
    assert hasher.chain(root, IDS, [("ab", 0), ("c", 0)]) != hasher.chain(root, IDS, [("a", 0), ("bc", 0)])


def test_a_block_hash_depends_on_parent_tokens_order_and_media_with_offset() -> None:
    hasher = make_hasher()
    root = hasher.root("", "")
    hashes = [
        hasher.chain(root, IDS, ()),
        hasher.chain(hasher.root("other", ""), IDS, ()),
        hasher.chain(root, (1, 2, 4, 3), ()),
        hasher.chain(root, IDS, [("a", 0)]),
        hasher.chain(root, IDS, [("a", -1)]),
        hasher.chain(root, IDS, [("b", 0)]),
        hasher.chain(root, IDS, [("a", 0), ("b", 2)]),
    ]
    assert len(set(hashes)) == len(hashes)
    assert all(len(h) == 32 for h in hashes)


def test_the_hash_scheme_is_pinned() -> None:
    # Workers of different releases compare these hashes: another layout needs another hash_scheme.
    def prefixed(text: bytes) -> bytes:
        return len(text).to_bytes(4, "little") + text

    names = (b"m", b"r", b"t", b"float32", b"fp32", b"none", b"sha256-chain-v1", b"salt", b"adapter")
    root = hashlib.sha256(b"root" + b"".join(map(prefixed, names))).digest()
    numbers = b"".join(n.to_bytes(4, "little") for n in (4, *IDS))
    media = prefixed(b"ff") + (-2).to_bytes(8, "little", signed=True)
    block = hashlib.sha256(b"block" + prefixed(root) + numbers + media).digest()
    hasher = make_hasher()
    assert hasher.root("salt", "adapter") == root
    assert hasher.chain(root, IDS, [("ff", -2)]) == block


@pytest.mark.parametrize("ids", [(1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, -1), (1, 2, 3, 2**32), ()])
def test_only_whole_blocks_of_known_tokens_are_hashed(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="4 token ids"):
        make_hasher().chain(b"p", ids, ())


@pytest.mark.parametrize("bits", [1, 2, 7, 8, 9, 255])
def test_fewer_bits_are_the_front_of_the_whole_hash_but_the_root_stays_whole(bits: int) -> None:
    whole, cut = make_hasher(), make_hasher(bits=bits)
    assert cut.root("s", "") == whole.root("s", "")
    expected = int.from_bytes(whole.chain(b"p", IDS, ())) >> (256 - bits)
    got = cut.chain(b"p", IDS, ())
    assert len(got) == -(-bits // 8)
    assert int.from_bytes(got) >> (8 * len(got) - bits) == expected
    assert int.from_bytes(got) & ((1 << (8 * len(got) - bits)) - 1) == 0


@pytest.mark.parametrize(("block_size", "bits"), [(0, 256), (4, 0), (4, 257)])
def test_impossible_sizes_are_refused(block_size: int, bits: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        BlockHasher(IDENTITY, block_size, bits=bits)


def test_prompt_chains_full_blocks_only() -> None:
    hasher = make_hasher()
    media = [MediaItem("a", 3, 3)]
    first, second = hasher.prompt(range(11), media, "salt", "ad")
    assert first.parent == hasher.root("salt", "ad")
    assert first.block_hash == hasher.chain(first.parent, (0, 1, 2, 3), [("a", 3)])
    assert second.parent == first.block_hash
    assert second == (
        hasher.chain(first.block_hash, (4, 5, 6, 7), [("a", -1)]),
        first.block_hash,
        (4, 5, 6, 7),
        (("a", -1),),
    )


@settings(derandomize=True, max_examples=100, deadline=None, database=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.integers(0, 9)), max_size=4),
    st.integers(1, 5),
)
def test_every_placeholder_position_is_named_by_its_block(
    items: list[tuple[str, int, int]], block_size: int
) -> None:
    media = [MediaItem(*item) for item in items]
    expected: dict[int, set[tuple[str, int]]] = {}
    for item in media:
        for position in range(item.offset, item.offset + item.num_tokens):
            index = position // block_size
            expected.setdefault(index, set()).add((item.mm_hash, item.offset - index * block_size))
    found = media_by_block(media, block_size)
    assert {index: set(inside) for index, inside in found.items()} == expected


@pytest.mark.parametrize("bits", [256, 250, 8])
def test_a_parent_is_the_whole_digest_of_all_that_is_before(bits: int) -> None:
    whole = list(make_hasher().prompt(range(20), (MediaItem("a", 3, 3),)))
    cut = list(make_hasher(bits=bits).prompt(range(20), (MediaItem("a", 3, 3),)))
    assert [block.parent for block in cut] == [block.parent for block in whole]
    assert [block.parent for block in whole[1:]] == [block.block_hash for block in whole[:-1]]
    hasher = make_hasher(bits=bits)
    assert [hasher.digest(*block) for block in cut] == [block.block_hash for block in whole]


@pytest.mark.parametrize("bits", [256, 250, 8])
def test_contents_are_what_the_hashes_of_a_prompt_are_made_of(bits: int) -> None:
    hasher = BlockHasher(IDENTITY, 4, bits=bits)
    media = (MediaItem("aa", 3, 6), MediaItem("bb", 14, 1))
    blocks = list(hasher.prompt(range(100, 118), media, "salt", "adapter"))
    hashes, contents = hasher.contents(range(100, 118), media, "salt", "adapter")
    assert hashes == [block.block_hash for block in blocks] and len(hashes) == 4
    assert contents == [block_content(b.parent, b.token_ids, b.media) for b in blocks]
    assert hashes == [hasher.chain(b.parent, b.token_ids, b.media) for b in blocks]
    with pytest.raises(ValueError, match="32 bits"):
        hasher.contents([-1] * 4)
