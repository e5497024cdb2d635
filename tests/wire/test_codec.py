"""Every record goes through the codec and comes out equal, and whatever else comes in is refused by a documented error.

It builds records from their own type hints, so that a new field or kind is covered without a change here.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankcast.errors import AuthenticationError, LimitError, PayloadError
from rankcast.topology import Worker
from rankcast.wire import codec as codec_module
from rankcast.wire.bodies import PROTOCOL, EntryBody, Identify, InitBody, Install
from rankcast.wire.codec import Codec, decode, find_secret
from rankcast.wire.reports import Fault, Report

SECRET = b"a secret for tests"
DOCUMENTED = (PayloadError, AuthenticationError, LimitError)
KINDS = (*typing.get_args(InitBody), *typing.get_args(EntryBody), Report)
UNIONS: dict[type, Any] = {
    **dict.fromkeys(typing.get_args(InitBody), InitBody),
    **dict.fromkeys(typing.get_args(EntryBody), EntryBody),
    Report: Report,
}
ODD_TEXT = st.text(st.characters(exclude_categories=()), max_size=30)


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(of_type(argument) for argument in arguments))
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return st.lists(of_type(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*(of_type(argument) for argument in arguments))
    if origin is Mapping:
        return st.dictionaries(*(of_type(argument) for argument in arguments), max_size=3)
    if hint is Worker:
        return workers()
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return records(hint)
    return {
        str: st.text(max_size=12),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        type(None): st.none(),
    }[hint]


def records(kind: type) -> st.SearchStrategy[Any]:
    if kind is Worker:
        return workers()
    hints = typing.get_type_hints(kind)
    hints.pop("protocol", None)
    return st.builds(kind, **{name: of_type(hints[name]) for name in kind.__struct_fields__ if name in hints})


@st.composite
def workers(draw: st.DrawFn) -> Worker:
    count = draw(st.integers(1, 64))
    return Worker(
        engine=draw(st.text("0123456789abcdef", min_size=1, max_size=32)),
        rank=draw(st.integers(0, count - 1)),
        workers=count,
        dp=draw(st.integers(0, 9)),
        tp=draw(st.integers(0, 9)),
        device=draw(st.text(max_size=5)),
    )


@pytest.mark.parametrize("secret", [None, SECRET], ids=["unsealed", "sealed"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_a_record_comes_out_equal_also_when_what_lies_around_it_is_encoded_anew(
    kind: type, secret: bytes | None, data: st.DataObject
) -> None:
    body = data.draw(records(kind))
    codec = Codec(secret)
    envelope = codec.seal(body)
    assert set(envelope) == ({"body"} if secret is None else {"body", "mac"})
    again = msgspec.json.decode(msgspec.json.encode(envelope))
    assert again == envelope
    opened = codec.open(again, UNIONS[kind], what="it")
    assert type(opened) is kind
    assert opened == body


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_a_signed_record_with_one_character_changed_is_never_opened(kind: type, data: st.DataObject) -> None:
    codec = Codec(SECRET)
    envelope = codec.seal(data.draw(records(kind)))
    at = data.draw(st.integers(0, len(envelope["body"]) - 1))
    other = data.draw(st.characters(exclude_categories=()).filter(lambda c: c != envelope["body"][at]))
    changed = {**envelope, "body": envelope["body"][:at] + other + envelope["body"][at + 1 :]}
    with pytest.raises(AuthenticationError):
        codec.open(changed, UNIONS[kind], what="it")


@settings(max_examples=200)
@given(
    signed=st.booleans(),
    kind=st.sampled_from(KINDS),
    data=st.data(),
)
def test_a_mutated_envelope_raises_documented_errors_only(signed: bool, kind: type, data: st.DataObject) -> None:
    codec = Codec(SECRET if signed else None)
    envelope: dict[str, Any] = dict(codec.seal(data.draw(records(kind))))
    text: str = envelope["body"]
    anything = st.one_of(st.none(), st.integers(), ODD_TEXT, st.lists(st.integers(), max_size=2), st.just({}))
    mutation = data.draw(st.sampled_from(["cut", "swap", "field", "value", "mac", "extra", "gone", "json"]))
    if mutation == "cut":
        envelope["body"] = text[: data.draw(st.integers(0, len(text) - 1))]
    elif mutation == "swap":
        at = data.draw(st.integers(0, len(text) - 1))
        envelope["body"] = text[:at] + data.draw(ODD_TEXT) + text[at + 1 :]
    elif mutation in ("field", "value"):
        fields = msgspec.json.decode(text)
        name = data.draw(st.sampled_from(sorted(fields)))
        value = data.draw(anything.filter(lambda v: not isinstance(v, str) or v.isascii()))
        if mutation == "value":
            fields[name] = value
        else:
            fields[name + "_"] = fields.pop(name)
        try:
            envelope["body"] = msgspec.json.encode(fields).decode()
        except (OverflowError, UnicodeError):
            return
        if signed:
            envelope["mac"] = codec._mac(envelope["body"])
    elif mutation == "mac":
        envelope["mac"] = data.draw(anything)
    elif mutation == "extra":
        envelope[data.draw(ODD_TEXT.filter(lambda key: key not in ("body", "mac")))] = 1
    elif mutation == "gone":
        del envelope[data.draw(st.sampled_from(sorted(envelope)))]
    else:
        envelope["body"] = data.draw(anything)
    try:
        opened = codec.open(envelope, UNIONS[kind], what="it")
    except DOCUMENTED:
        return
    # A value of a fitting type, or a field that has a default, is another record and may be opened; no more than that.
    assert isinstance(opened, msgspec.Struct)
    assert mutation not in ("extra", "cut", "json")
    if signed:
        assert mutation in ("field", "value") or envelope == codec.seal(opened)


@given(
    envelope=st.recursive(
        st.none() | st.integers() | ODD_TEXT, lambda inner: st.lists(inner) | st.dictionaries(ODD_TEXT, inner)
    )
)
@pytest.mark.parametrize("secret", [None, SECRET], ids=["unsigned", "signed"])
def test_anything_at_all_in_place_of_an_envelope_is_refused(envelope: object, secret: bytes | None) -> None:
    with pytest.raises(DOCUMENTED):
        Codec(secret).open(envelope, Report, what="it")


@pytest.mark.parametrize("secret", [None, SECRET], ids=["unsigned", "signed"])
@pytest.mark.parametrize(
    "envelope",
    [
        {"body": "\ud800", "mac": "a"},
        {"body": "{}", "mac": "\ud800"},
        {"body": "{}", "mac": "a", "\ud800": 1},
        {"body": '{"protocol": 1, "kind": "\ud800"}', "mac": "a"},
    ],
)
def test_a_lone_surrogate_is_refused_and_the_refusal_can_be_reported(
    envelope: dict[str, Any], secret: bytes | None
) -> None:
    with pytest.raises(DOCUMENTED) as caught:
        Codec(secret).open(envelope, InitBody, what="it")
    assert msgspec.json.encode(Fault.of(caught.value))


def test_a_fault_whose_text_has_a_lone_surrogate_can_be_reported() -> None:
    for error in (PayloadError("about \ud800", tensor="\udfff"), OSError("no file \udc80")):
        assert b"ud" in msgspec.json.encode(Fault.of(error))


@pytest.mark.parametrize("secret", [None, SECRET], ids=["unsigned", "signed"])
@pytest.mark.parametrize("depth", [400, 950, 5000, 200_000])
def test_deep_nesting_is_refused_and_not_a_crash(depth: int, secret: bytes | None) -> None:
    codec = Codec(secret)
    text = '{"protocol": 1, "kind": "identify", "request": ' + "[" * depth + "]" * depth + "}"
    envelope = {"body": text, "mac": codec._mac(text)} if secret else {"body": text}
    with pytest.raises(PayloadError):
        codec.open(envelope, InitBody, what="it")
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    with pytest.raises(PayloadError):
        codec.open(nested, InitBody, what="it")
    with pytest.raises(PayloadError):
        codec.open({"body": nested}, InitBody, what="it")
    while nested:  # freeing it all at once would nest as deep
        nested = nested.pop()


def test_another_protocol_is_refused_for_its_number_before_its_fields_are_read() -> None:
    with pytest.raises(PayloadError, match=rf"speaks protocol {PROTOCOL + 1}, this side speaks {PROTOCOL}"):
        decode(f'{{"protocol": {PROTOCOL + 1}, "kind": "something new"}}', InitBody, what="it")


def test_an_unknown_kind_is_refused_by_its_name() -> None:
    with pytest.raises(PayloadError, match="sabotage"):
        decode(f'{{"protocol": {PROTOCOL}, "kind": "sabotage"}}', InitBody, what="it")


def test_an_entry_is_no_init_message_and_an_init_message_no_entry() -> None:
    codec = Codec()
    install = Install(session="s", engine="e", rank=0, workers=1, sequence=1, weight_version="1", round=0)
    with pytest.raises(PayloadError):
        codec.open(codec.seal(install), InitBody, what="it")
    with pytest.raises(PayloadError):
        codec.open(codec.seal(Identify(request="r", report="http://127.0.0.1/")), EntryBody, what="it")


def test_with_a_secret_an_unsigned_record_is_refused_and_the_message_says_what_to_set() -> None:
    envelope = Codec().seal(Identify(request="r", report="u"))
    with pytest.raises(AuthenticationError, match="RANKCAST_SECRET"):
        Codec(SECRET).open(envelope, InitBody, what="it")


def test_another_secret_does_not_open_and_no_error_shows_the_secret() -> None:
    envelope = Codec(b"one").seal(Identify(request="r", report="u"))
    with pytest.raises(AuthenticationError, match="different secrets") as caught:
        Codec(SECRET).open(envelope, InitBody, what="it")
    assert SECRET.decode() not in str(caught.value) + repr(Codec(SECRET))


def test_a_body_over_the_limit_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "BODY_LIMIT", 100)
    with pytest.raises(LimitError, match="101 characters"):
        Codec().open({"body": "{" * 101}, Report, what="it")


def test_the_secret_comes_from_the_caller_then_the_environment_then_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: typing.Any
) -> None:
    assert find_secret() is None
    path = tmp_path / "secret"
    path.write_text("from the file\n")
    monkeypatch.setenv("RANKCAST_SECRET_FILE", str(path))
    assert find_secret() == b"from the file"
    monkeypatch.setenv("RANKCAST_SECRET", "from the environment")
    assert find_secret() == b"from the environment"
    assert find_secret("given") == b"given"


def test_an_empty_secret_or_an_unreadable_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: typing.Any
) -> None:
    for empty in ("", None):
        monkeypatch.setenv("RANKCAST_SECRET", "")
        with pytest.raises(AuthenticationError, match="empty"):
            find_secret(empty)
    monkeypatch.delenv("RANKCAST_SECRET")
    monkeypatch.setenv("RANKCAST_SECRET_FILE", str(tmp_path / "absent"))
    with pytest.raises(AuthenticationError, match="cannot be read"):
        find_secret()
