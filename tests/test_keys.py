"""Page keys: everything that decides a page's bytes changes its key, and nothing else does."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.keys import Adapter, ExtraKey, PageKeys, chain_root, digest

NAMESPACE = bytes(range(32))
ADAPTER = Adapter("tenant", "adapters/one", "v1")
IMAGE = ExtraKey(10, 20, "image", b"cat")
TOKENS = range(1000, 1032)
PAGE = 8

GOLDEN_ROOT = "ebfe41910155f13c3d9e1b5234421bb19227311c25f321602a5210a15a63d44f"
GOLDEN = ["5f6edc8b8106a56a", "ed57e7a35307305b", "e56e1e264213a83d", "0241a542f87701f5"]
GOLDEN_TAIL = "6f6794333ae2ced4"

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def keys_of(tokens: Sequence[int], extras: Iterable[ExtraKey] = (), page: int = PAGE, **root: object) -> list[bytes]:
    chain = PageKeys(chain_root(NAMESPACE, **root), page, extras)  # type: ignore[arg-type]
    chain.extend(tokens)
    return list(chain.keys)


def hashed(*fields: bytes) -> bytes:
    """H as the module's docstring defines it."""
    return hashlib.sha256(b"".join(len(field).to_bytes(4, "little") + field for field in fields)).digest()


@given(tokens_lists, st.integers(1, 9))
def test_a_key_is_the_hash_of_its_parent_and_its_tokens_as_documented(tokens: list[int], page: int) -> None:
    parent, expected = chain_root(NAMESPACE), []
    for start in range(0, len(tokens) - page + 1, page):
        content = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + page])
        parent = hashed(parent, content, b"")
        expected.append(parent)
    assert keys_of(tokens, page=page) == expected


def test_the_key_format_has_not_drifted() -> None:
    plain = keys_of(TOKENS)
    rich = keys_of(TOKENS, [IMAGE, ExtraKey(0, 8, "audio", b"meow")], salt="s", adapter=ADAPTER)
    assert [key.hex()[:16] for key in (plain[0], plain[3], rich[0], rich[3])] == GOLDEN
    assert chain_root(NAMESPACE).hex() == GOLDEN_ROOT


def test_fields_are_told_apart_by_their_lengths() -> None:
    assert digest(b"a", b"bc") != digest(b"ab", b"c")
    assert digest(b"", b"a") != digest(b"a", b"") != digest(b"a")


ROOTS: dict[str, dict[str, object]] = {
    "nothing": {},
    "empty salt": {"salt": ""},
    "salt": {"salt": "a"},
    "other salt": {"salt": "b"},
    "nameless adapter": {"adapter": Adapter("", "", "")},
    "adapter": {"adapter": ADAPTER},
    "adapter's other name": {"adapter": replace(ADAPTER, name="other")},
    "adapter's other path": {"adapter": replace(ADAPTER, path="adapters/two")},
    "adapter's other version": {"adapter": replace(ADAPTER, version="v2")},
    "adapter with its fields cut elsewhere": {"adapter": Adapter("tenanta", "dapters/one", "v1")},
    "salt and adapter": {"salt": "a", "adapter": ADAPTER},
}


def test_salt_and_each_field_of_the_adapter_change_every_key() -> None:
    chains = [keys_of(TOKENS, **root) for root in ROOTS.values()]
    assert len({key for chain in chains for key in chain}) == len(ROOTS) * 4


def test_another_namespace_shares_no_key() -> None:
    other = PageKeys(chain_root(b"o" * 32), PAGE)
    other.extend(TOKENS)
    assert not set(other.keys) & set(keys_of(TOKENS))


@given(st.lists(st.integers(0, 99), min_size=24, max_size=24), st.integers(0, 23))
def test_a_token_changes_its_page_and_all_that_follow_and_none_before(tokens: list[int], at: int) -> None:
    before = keys_of(tokens)
    tokens[at] += 1
    same = [one == other for one, other in zip(before, keys_of(tokens), strict=True)]
    assert same == [page < at // PAGE for page in range(3)]


@given(tokens_lists, st.lists(st.integers(0, 60), max_size=6), st.integers(1, 9))
def test_keys_computed_piece_by_piece_equal_those_computed_at_once(
    tokens: list[int], cuts: list[int], page: int
) -> None:
    extras = [ExtraKey(3, 11, "image", b"x"), ExtraKey(11, 40, "audio", b"y")]
    pieces, bounds = PageKeys(chain_root(NAMESPACE), page, extras), [0, *sorted(cuts), len(tokens)]
    for start, stop in pairwise(bounds):
        pieces.extend(tokens[start:stop])
    assert pieces.num_tokens == len(tokens)
    assert pieces.keys == keys_of(tokens, extras, page)


@pytest.mark.parametrize(
    "other",
    [
        replace(IMAGE, data=b"dog"),
        replace(IMAGE, kind="video"),
        replace(IMAGE, start=11),
        replace(IMAGE, stop=21),
        replace(IMAGE, kind="imagec", data=b"at"),
    ],
    ids=["data", "kind", "start", "stop", "cut"],
)
def test_a_media_item_decides_keys_from_the_page_it_touches_on_and_not_before(other: ExtraKey) -> None:
    without, one, two = keys_of(TOKENS), keys_of(TOKENS, [IMAGE]), keys_of(TOKENS, [other])
    assert without[0] == one[0] == two[0]
    assert all(len({*keys}) == 3 for keys in zip(without[1:], one[1:], two[1:], strict=True))


@pytest.mark.parametrize(("start", "stop", "first"), [(0, 8, 0), (8, 9, 1), (7, 9, 0), (31, 32, 3), (32, 40, 4)])
def test_an_item_touches_the_pages_that_hold_one_of_its_tokens(start: int, stop: int, first: int) -> None:
    with_item = keys_of(TOKENS, [ExtraKey(start, stop, "image", b"cat")])
    assert [one == other for one, other in zip(keys_of(TOKENS), with_item, strict=True)] == [
        page < first for page in range(4)
    ]


def test_two_images_swapped_in_one_prompt_give_other_keys() -> None:
    cat, dog = ExtraKey(0, 4, "image", b"cat"), ExtraKey(4, 8, "image", b"dog")
    swapped = [replace(cat, data=b"dog"), replace(dog, data=b"cat")]
    assert not set(keys_of(TOKENS, [cat, dog])) & set(keys_of(TOKENS, swapped))


@given(st.permutations([ExtraKey(0, 8, "image", bytes([item])) for item in range(4)]))
def test_the_order_in_which_items_are_given_does_not_matter(items: list[ExtraKey]) -> None:
    assert keys_of(TOKENS, items) == keys_of(TOKENS, sorted(items, key=lambda item: item.data))


PROGRAM = """
from vllm_hicache.keys import Adapter, ExtraKey, PageKeys, chain_root
from vllm_hicache.namespace import Namespace
space = Namespace("model", "0", "bf16", "none", "cpu", 30, 3, 4096, 32, 64, "1x1")
items = {ExtraKey(0, 64, kind, kind.encode()) for kind in ("image", "audio", "video", "embeds", "text")}
chain = PageKeys(chain_root(space.digest(), "salt", Adapter("a", "b", "c")), 64, items)
chain.extend(range(1000))
print(space.digest().hex(), *(key.hex() for key in chain.keys))
"""


def test_fresh_processes_with_any_hash_seed_compute_equal_keys_and_namespaces() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2", "3")
    ]
    assert len(said[0].split()) == 16
    assert len(set(said)) == 1


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["a"], [None], [1, 2, -3]])
def test_a_bad_token_id_is_refused_and_changes_nothing(bad: list[int]) -> None:
    chain = PageKeys(chain_root(NAMESPACE), 4)
    chain.extend([1, 2])
    with pytest.raises(ValueError, match=r"integers in \[0, 2\*\*32\)"):
        chain.extend([3, 4, *bad])
    assert (chain.keys, chain.num_tokens) == ([], 2)


@pytest.mark.parametrize(("root", "page"), [(b"short", 4), (bytes(32), 0), (bytes(32), -1)])
def test_a_root_or_page_of_the_wrong_size_is_refused(root: bytes, page: int) -> None:
    with pytest.raises(ValueError, match=rf"got {page} and {len(root)}"):
        PageKeys(root, page)


def named_with_next(tokens: Sequence[int], page: int = PAGE, pieces: Iterable[int] = ()) -> PageKeys:
    """Keys of pages that are known by the next token too, of tokens that come in pieces of these lengths."""
    chain, start = PageKeys(chain_root(NAMESPACE), page, with_next=True), 0
    for length in pieces:
        chain.extend(tokens[start : start + length])
        start += length
    chain.extend(tokens[start:])
    return chain


@given(tokens_lists, st.integers(1, 9), st.lists(st.integers(0, 20), max_size=6))
def test_a_key_with_the_next_token_is_the_hash_of_the_plain_key_and_that_token(
    tokens: list[int], page: int, pieces: list[int]
) -> None:
    plain = keys_of(tokens, page=page)
    expected = [
        hashed(key, tokens[(index + 1) * page].to_bytes(4, "little"))
        for index, key in enumerate(plain)
        if (index + 1) * page < len(tokens)
    ]
    chain = named_with_next(tokens, page, pieces)
    assert (chain.keys, chain.plain, chain.num_tokens) == (expected, plain, len(tokens))
    assert chain.next_at == (len(expected) + 1) * page + 1


def test_a_page_whose_next_token_is_unknown_has_no_key_yet() -> None:
    chain = named_with_next(TOKENS[: 2 * PAGE])
    assert (len(chain.keys), len(chain.plain)) == (1, 2)
    chain.extend([7])
    assert (len(chain.keys), len(chain.plain)) == (2, 2)


def test_prompts_that_part_after_a_page_share_its_plain_key_and_all_before_it() -> None:
    one, other = named_with_next(TOKENS), named_with_next([*TOKENS[: 2 * PAGE], *TOKENS[: 2 * PAGE]])
    assert one.keys[0] == other.keys[0]
    assert one.plain[:2] == other.plain[:2]
    assert not set(one.keys[1:]) & set(other.keys[1:])


def test_without_the_next_token_both_names_are_one() -> None:
    chain = PageKeys(chain_root(NAMESPACE), PAGE)
    chain.extend(TOKENS)
    assert chain.keys is chain.plain
    assert chain.next_at == 5 * PAGE


# The unfinished last page


def tail_of(tokens: Sequence[int], page: int = PAGE, extras: Iterable[ExtraKey] = ()) -> PageKeys:
    chain = PageKeys(chain_root(NAMESPACE), page, extras)
    chain.extend(tokens)
    return chain


def test_a_chain_of_whole_pages_has_no_unfinished_one() -> None:
    assert tail_of([]).tail() is None
    assert tail_of(TOKENS).tail() is None


@given(tokens_lists, st.integers(1, 61))
def test_an_unfinished_page_is_named_by_the_formula_of_all_pages(tokens: list[int], page: int) -> None:
    chain, rest = tail_of(tokens, page), tokens[len(tokens) // page * page :]
    parent = chain.keys[-1] if chain.keys else chain_root(NAMESPACE)
    content = b"".join(token.to_bytes(4, "little") for token in rest)
    assert chain.tail() == (hashed(parent, content, b"") if rest else None)


@given(tokens_lists, st.integers(1, 9))
def test_asking_for_the_unfinished_page_changes_nothing(tokens: list[int], page: int) -> None:
    asked, plain = tail_of([], page), tail_of(tokens, page)
    for token in tokens:
        asked.extend([token])
        asked.tail()
    assert (asked.keys, asked.num_tokens, asked.tail()) == (plain.keys, plain.num_tokens, plain.tail())


def test_every_length_of_an_unfinished_page_has_a_name_of_its_own() -> None:
    names = [tail_of(TOKENS[:length]).tail() or tail_of(TOKENS[:length]).keys[-1] for length in range(1, 2 * PAGE + 1)]
    assert len(set(names)) == 2 * PAGE


def test_the_name_of_an_unfinished_page_stays_what_it_is() -> None:
    tail = tail_of(TOKENS[:11]).tail()
    assert tail is not None
    assert tail.hex()[:16] == GOLDEN_TAIL


@pytest.mark.parametrize(("start", "differs"), [(7, True), (8, True), (10, True), (16, False)])
def test_an_item_beside_the_tokens_changes_the_name_of_the_unfinished_page_it_touches(
    start: int, differs: bool
) -> None:
    item = ExtraKey(start, start + 1, "image", b"cat")
    chain, plain = tail_of(TOKENS[:11], extras=[item]), tail_of(TOKENS[:11])
    assert (chain.keys != plain.keys) is (start < PAGE)
    assert (chain.tail() != plain.tail()) is differs


def test_the_unfinished_page_of_a_chain_named_by_next_tokens_is_that_of_the_plain_chain() -> None:
    chain = named_with_next(TOKENS[:19])
    assert chain.tail() == tail_of(TOKENS[:19]).tail()
    assert named_with_next(TOKENS[: 2 * PAGE]).tail() is None
