"""Keys of an S3 bucket: one to one, safe for every server, and found again by their prefix."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from store_conformance import AWKWARD_NAMES

from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import MAX_NAME_CHARS
from vllm_hicache.storage.s3_client import MAX_PREFIX_CHARS
from vllm_hicache.storage.s3_keys import MAX_KEY_CHARS, decode, encode, key_prefixes

_SAFE_KEY = re.compile(r"[A-Za-z0-9!_.-][A-Za-z0-9!_./-]*\.hc")
_characters = st.one_of(
    st.sampled_from("a.!%/~+ hc2E"), st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="/")
)


def valid(text: str) -> bool:
    parts = text.split("/")
    return len(text) <= MAX_NAME_CHARS and all(part and part == part.strip() for part in parts)


names = st.text(_characters, min_size=1, max_size=MAX_NAME_CHARS).filter(valid)
near_leaves = st.lists(st.sampled_from(["a", ".", "hc", "/", "!", "2E", "h", "c", ".hc", "!/"]), max_size=8).map(
    "".join
)
all_names = st.one_of(names, near_leaves.filter(valid), st.sampled_from(AWKWARD_NAMES))


@given(all_names)
def test_a_key_decodes_to_its_name(text: str) -> None:
    assert decode(encode(ObjectName(text))) == text


@given(all_names, all_names)
def test_different_names_have_different_keys_and_none_is_a_folder_of_the_other(first: str, second: str) -> None:
    keys = encode(ObjectName(first)), encode(ObjectName(second))
    assert (keys[0] == keys[1]) == (first == second)
    assert not keys[0].startswith(keys[1] + "/")


@given(all_names)
def test_a_key_is_short_and_of_safe_characters_in_ordinary_parts(text: str) -> None:
    key = encode(ObjectName(text))
    assert len(key) <= MAX_KEY_CHARS <= 1024 - MAX_PREFIX_CHARS
    assert _SAFE_KEY.fullmatch(key)
    for part in key.split("/"):
        assert 0 < len(part) <= 203
        assert part not in (".", "..")


@given(all_names, st.integers(0, MAX_NAME_CHARS))
@example("a.hc/b", 3)
def test_a_key_begins_with_a_prefix_of_each_beginning_of_its_name(text: str, length: int) -> None:
    key = encode(ObjectName(text))
    found = [prefix for prefix in key_prefixes(text[:length]) if key.startswith(prefix)]
    assert len(found) == 1


@given(st.one_of(st.text(max_size=40), near_leaves, names).map(lambda text: text + ".hc"))
def test_a_key_that_is_not_exactly_an_encoding_is_no_object(key: str) -> None:
    name = decode(key)
    assert name is None or encode(name) == key


FOREIGN_KEYS = [
    *("a", "a.h", ".hc", "/a.hc", "a/.hc", "a//b.hc", "a/.b.hc", "../a.hc", "a.hc/b.hc", "a b.hc", "é.hc"),
    *("a!.hc", "a!2e.hc", "a!41.hc", "a!C3.hc", "!/.hc", "!/YQ.hc", "!/é.hc", "x" * 201 + ".hc"),
]


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_keys_of_others_are_no_objects(key: str) -> None:
    assert decode(key) is None


def test_the_name_of_a_chunk_is_its_own_key() -> None:
    name = ObjectName(f"{'0f' * 8}/ab/{'ab' * 32}.0.target.3.11")
    assert encode(name) == name + ".hc"
    assert key_prefixes(name[:20])[0] == name[:20]
