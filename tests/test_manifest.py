"""Manifests: columns that say what they were made of, survive JSON, and refuse what is twofold or unknown."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rankcast.errors import ManifestError
from rankcast.manifest import DTYPES, LISTED, Manifest, TensorMeta, canonical_dtype, listed, nbytes, union

names = st.text(min_size=1, max_size=12)
metas = st.builds(
    TensorMeta,
    names,
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
)
rows = st.lists(metas, max_size=8, unique_by=lambda meta: meta.name)


@given(rows)
def test_rows_come_back_as_they_went_in_and_survive_json(given_: list[TensorMeta]) -> None:
    manifest = Manifest.of(given_)
    assert list(manifest.rows()) == [manifest.row(i) for i in range(len(manifest))] == given_
    again = msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest)
    again.check()
    assert again == manifest
    assert again.hash == manifest.hash
    assert manifest.sizes == tuple(meta.nbytes for meta in given_)
    assert all(manifest.index[meta.name] == i for i, meta in enumerate(given_))


@given(rows, rows)
def test_hashes_are_equal_exactly_for_equal_manifests(one: list[TensorMeta], other: list[TensorMeta]) -> None:
    assert (Manifest.of(one).hash == Manifest.of(other).hash) == (one == other)
    if len(one) > 1:
        assert Manifest.of(one).hash != Manifest.of(one[::-1]).hash


@given(rows, st.data())
def test_a_name_given_twice_is_refused_by_name(given_: list[TensorMeta], data: st.DataObject) -> None:
    assume(given_)
    twice = data.draw(st.sampled_from(given_))
    with pytest.raises(ManifestError, match="twice") as refused:
        Manifest.of([*given_, TensorMeta(twice.name, "int8", (1,))])
    assert refused.value.tensor == twice.name


@given(rows, st.text(max_size=4), st.characters(categories=["Cs"]), st.text(max_size=4))
def test_a_name_without_a_utf_8_form_is_refused_by_its_repr(
    given_: list[TensorMeta], before: str, odd: str, after: str
) -> None:
    name = before + odd + after
    with pytest.raises(ManifestError, match="not UTF-8") as refused:
        Manifest.of([*given_, TensorMeta(name, "int8", (1,))])
    assert ascii(name) in refused.value.message
    assert refused.value.tensor == ascii(name)
    msgspec.json.encode(refused.value.message)


@given(rows, st.data())
def test_taking_rows_keeps_their_order(given_: list[TensorMeta], data: st.DataObject) -> None:
    manifest = Manifest.of(given_)
    picked = data.draw(st.permutations(range(len(given_)))) if given_ else []
    assert list(manifest.take(picked).rows()) == [given_[i] for i in picked]


@given(rows, st.lists(st.sets(st.integers(0, 7)), max_size=4))
def test_a_union_has_every_tensor_once_in_order_of_first_appearance(
    given_: list[TensorMeta], held: list[set[int]]
) -> None:
    parts = [[given_[i] for i in sorted(one) if i < len(given_)] for one in held]
    merged = union([Manifest.of(part) for part in parts])
    assert list(merged.rows()) == list(dict.fromkeys(meta for part in parts for meta in part))


def test_two_ranks_that_describe_a_tensor_differently_are_both_named() -> None:
    one, other = (Manifest.of([TensorMeta("w", "float32", shape)]) for shape in ((4, 2), (2, 2)))
    with pytest.raises(
        ManifestError, match=r"w is float32\[4, 2\] on trainer rank 0 but float32\[2, 2\] on .* 1"
    ) as no:
        union([one, other])
    assert no.value.tensor == "w"


def test_columns_of_different_lengths_unknown_dtypes_and_negative_sizes_are_refused() -> None:
    for manifest, message in (
        (Manifest(("a",), (), ((1,),)), "1 names, 0 dtypes and 1 shapes"),
        (Manifest(("a",), ("float33",), ((1,),)), "a has the unknown dtype 'float33'"),
        (Manifest(("a",), ("float32",), ((-1,),)), r"a has a negative size in its shape \[-1\]"),
    ):
        with pytest.raises(ManifestError, match=message):
            manifest.check()


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"names":[],"dtypes":[],"shapes":[],"more":1}', type=Manifest)


def test_the_table_of_dtypes_is_torchs_own() -> None:
    for name, size in DTYPES.items():
        assert getattr(torch, name).itemsize == size
    known = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    left = {str(dtype).removeprefix("torch.") for dtype in known} - DTYPES.keys()
    # What torch has besides: quantised, sub-byte and packed kinds, which no checkpoint tensor here may have.
    assert not {name for name in left if name.startswith(("float8", "bfloat", "complex")) and "x2" not in name}


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=4))
def test_bytes_are_those_of_a_dense_tensor(dtype: str, shape: list[int]) -> None:
    assert nbytes(dtype, shape) == np.zeros(shape, dtype=np.int8).size * DTYPES[dtype]
    assert nbytes("uint8", [2**40, 2**20]) == 2**60 == math.prod([2**40, 2**20])


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_torchs_prefix_is_dropped(name: str) -> None:
    assert canonical_dtype(f"torch.{name}") == canonical_dtype(name) == name


@pytest.mark.parametrize("name", ["", "float", "torch.", "torch.torch.float32", "Float32", "qint8"])
def test_an_unknown_dtype_is_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="unknown dtype"):
        canonical_dtype(name)


@given(st.lists(names, max_size=30))
def test_a_list_of_names_shows_ten_and_counts_all(given_: list[str]) -> None:
    text = listed(given_)
    assert text.endswith(f"({len(given_)} in all)")
    assert text.startswith(", ".join(given_[:LISTED]))
    assert (f" and {len(given_) - LISTED} more (" in text) == (len(given_) > LISTED)
