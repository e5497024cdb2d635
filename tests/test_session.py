"""The session machine: every call in every state, against a small model that is written from the design's words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rankcast.errors import LeaseError, RankcastError, StateError
from rankcast.process import ProcessIdentity
from rankcast.session import Session, State
from rankcast.wire.bodies import Owner

LIVING = {"alice": True, "bob": True, "carol": False}
LEASE = 10.0


def owner(name: str) -> Owner:
    process = ProcessIdentity(host="host", namespace="ns", pid=1 + list(LIVING).index(name), start_time=1)
    return Owner(id=name, process=process, name=f"trainer {name}")


def is_dead(process: ProcessIdentity) -> bool:
    return not list(LIVING.values())[process.pid - 1]


class Against(RuleBasedStateMachine):
    """The machine and the model take the same calls; the model says ``True`` (act), ``None`` (repeat) or ``False``."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session(provably_dead=is_dead)
        self.now = 0.0
        # The model.
        self.open = False
        self.prepared = False
        self.installs = 0
        self.done = 0
        self.whole = True
        self.broken = False
        self.holder: str | None = None
        self.until = 0.0
        self.completed = 0
        self.orphaned = self.unpublished = False
        self.last: str | None = None

    def call(self, act: Callable[[], Any], allowed: bool | None) -> Any:
        """Make a call: refused ones must change nothing, and name why."""
        if allowed is not False:
            return act()
        before = copy.deepcopy(self._shown())
        with pytest.raises(RankcastError) as refusal:
            act()
        assert refusal.value.message
        assert self._shown() == before
        return "refused"

    def _shown(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.session).items() if name != "_provably_dead"}

    def _free_for(self, name: str | None) -> bool:
        held = self.holder is not None and self.holder != name
        return not held or self.until <= self.now or not LIVING[str(self.holder)]

    @rule(seconds=st.sampled_from([0.0, 3.0, 9.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(list(LIVING)))
    def claim(self, name: str) -> None:
        allowed = self._free_for(name)
        ended = self.call(lambda: self.session.claim(f"session of {name}", owner(name), LEASE, self.now), allowed)
        if allowed:
            assert ended == self.open
            if self.open or self.holder != name:
                self._lose_holder()
            if self.open:
                self._end()
            self.holder = self.last = name
            self.until = self.now + LEASE
            assert self.session.name == f"session of {name}"

    @rule(name=st.one_of(st.none(), st.sampled_from(list(LIVING))))
    def ask_for_the_lease(self, name: str | None) -> None:
        self.call(
            lambda: self.session.check_lease(owner(name) if name else None, self.now),
            self._free_for(name),
        )

    @rule()
    def hear_from_the_owner(self) -> None:
        self.session.renew(self.now)
        if self.holder is not None:
            self.until = self.now + LEASE

    @rule(name=st.sampled_from(list(LIVING)), settled=st.booleans(), published=st.booleans())
    def release(self, name: str, settled: bool, published: bool) -> None:
        held = self.session.release(owner(name), settled=settled, published=published)
        assert held == (self.holder == name and not self.open)
        if held and published:
            self.unpublished = False
        if held:
            self._lose_holder()
        if settled and self.last == name and self.holder is None:
            self.orphaned = False

    @rule(name=st.sampled_from(list(LIVING)))
    def ask_for_an_init(self, name: str) -> None:
        own = self.open and self.holder == name and self.until > self.now and LIVING[name]
        self.call(lambda: self.session.check_init(owner(name), self.now), self._free_for(name) and not own)

    @rule()
    def forget_whoever_holds_it(self) -> None:
        self.session.forget_holder()
        if not self.open:
            self._lose_holder()

    @rule()
    def start(self) -> None:
        allowed = not self.open
        self.call(self.session.start, allowed)
        if allowed:
            self.open, self.prepared, self.installs, self.done, self.broken = True, False, 0, 0, False

    @rule(sequence=st.integers(-1, 2), installs=st.integers(0, 3))
    def prepare(self, sequence: int, installs: int) -> None:
        repeat = self.open and self.prepared and sequence == 0
        allowed = self.open and not self.prepared and sequence == 0
        act = self.call(lambda: self.session.may_prepare(sequence), None if repeat else allowed)
        assert act in ("refused", allowed)
        if allowed:
            self.session.prepared(installs)
            self.prepared, self.installs = True, installs

    @rule(sequence=st.integers(-1, 5), writes=st.booleans(), fails=st.booleans())
    def install(self, sequence: int, writes: bool, fails: bool) -> None:
        ready = self.open and self.prepared
        repeat = ready and 0 < sequence <= self.done
        allowed = ready and sequence == self.done + 1 and sequence <= self.installs
        act = self.call(lambda: self.session.may_install(sequence), None if repeat else allowed)
        assert act in ("refused", allowed)
        if not allowed:
            return
        if writes or fails:
            self.session.writing()
            self.whole = False
            assert not self.session.servable
        if fails:
            self.session.broken()
            self.open, self.broken = False, True
        else:
            self.session.installed(sequence)
            self.done = sequence

    @rule(wrote=st.booleans())
    def finish(self, wrote: bool) -> None:
        complete = self.prepared and self.done == self.installs
        allowed = self.open and (complete or self.holder is None)
        self.call(self.session.check_finish, allowed)
        if allowed:
            self.session.finished(wrote=wrote)
            if self.holder is not None or wrote:
                self.unpublished = self.holder is not None
            self.open, self.whole, self.completed = False, True, self.completed + 1

    @rule()
    def abandon(self) -> None:
        self.session.abandon()
        self._end()
        self._lose_holder()

    @rule(name=st.sampled_from(["session of alice", "session of bob", "another"]))
    def check_session(self, name: str) -> None:
        self.call(lambda: self.session.check_session(name), self.session.name == name)

    @rule()
    def write_outside_of_a_session(self) -> None:
        if not self.open:
            self.call(self.session.writing, False)

    def _end(self) -> None:
        self.open, self.broken = False, not self.whole

    def _lose_holder(self) -> None:
        self.orphaned = self.orphaned or self.holder is not None
        self.holder = None

    @invariant()
    def the_two_agree(self) -> None:
        assert self.session.is_open == self.open
        assert self.session.servable == self.whole
        assert self.session.generation == self.completed
        assert self.session.claimed == (self.holder is not None)
        assert self.session.orphaned == self.orphaned
        assert self.session.unpublished == self.unpublished
        assert self.session.lapsed(self.now) == (self.holder is not None and self._free_for(None))
        assert self.session.held_by_other(owner("bob")) == (self.holder not in (None, "bob"))
        if not self.open:
            assert self.session.state is (State.UNUSABLE if self.broken else State.IDLE)
        elif not self.prepared:
            assert self.session.state is State.STARTED
        elif self.done == self.installs:
            assert self.session.state is State.INSTALLED
        else:
            assert self.session.state in (State.PREPARED, State.INSTALLING)

    @invariant()
    def an_unusable_worker_is_never_servable(self) -> None:
        assert not (self.session.state is State.UNUSABLE and self.session.servable)


Against.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAgainstTheModel = Against.TestCase


@pytest.fixture
def session() -> Session:
    return Session(provably_dead=is_dead)


def to_installing(session: Session) -> None:
    session.claim("s", owner("alice"), LEASE, 0.0)
    session.start()
    assert session.may_prepare(0)
    session.prepared(2)
    assert session.may_install(1)
    session.writing()
    session.installed(1)


def test_a_skipped_number_is_refused_naming_both(session: Session) -> None:
    to_installing(session)
    with pytest.raises(StateError, match="sequence number 3 came, expected 2 of 2"):
        session.may_install(3)


def test_a_repeated_number_is_not_acted_on(session: Session) -> None:
    to_installing(session)
    assert not session.may_install(1)
    assert not session.may_prepare(0)


def test_an_older_number_is_a_repeat_as_well(session: Session) -> None:
    to_installing(session)
    assert session.may_install(2)
    session.installed(2)
    assert not session.may_install(1)
    assert not session.may_install(2)
    with pytest.raises(StateError):
        session.may_install(3)


def test_no_install_before_prepare(session: Session) -> None:
    session.start()
    with pytest.raises(StateError, match="prepare first"):
        session.may_install(1)


def test_finish_needs_every_install_of_a_claimed_session(session: Session) -> None:
    to_installing(session)
    with pytest.raises(StateError, match="after 1 of 2 installs"):
        session.check_finish()


def test_a_start_after_a_failure_forgets_everything_but_that_the_weights_are_gone(session: Session) -> None:
    to_installing(session)
    session.broken()
    session.abandon()
    session.claim("again", owner("alice"), LEASE, 1.0)
    session.start()
    assert not session.servable
    with pytest.raises(StateError, match="prepare first"):
        session.may_install(2)
    assert session.may_prepare(0)
    session.abandon()
    assert session.state is State.UNUSABLE


def test_an_abort_before_the_first_write_keeps_the_old_weights(session: Session) -> None:
    session.claim("s", owner("alice"), LEASE, 0.0)
    session.start()
    session.prepared(2)
    session.abandon()
    assert session.state is State.IDLE
    assert session.servable
    assert not session.claimed


def test_the_holder_is_named_with_the_time_left(session: Session) -> None:
    session.claim("s", owner("alice"), LEASE, 0.0)
    with pytest.raises(LeaseError, match="trainer alice holds this fleet for 6 s more"):
        session.claim("t", owner("bob"), LEASE, 4.0)
    session.claim("t", owner("bob"), LEASE, 10.0)


def test_a_dead_holder_holds_nothing(session: Session) -> None:
    session.claim("s", owner("carol"), LEASE, 0.0)
    session.start()
    assert session.claim("t", owner("bob"), LEASE, 0.0) is True
    assert session.state is State.IDLE


def test_forgetting_a_holder_ends_no_session(session: Session) -> None:
    session.claim("s", owner("carol"), LEASE, 0.0)
    session.start()
    session.forget_holder()
    assert session.claimed
    session.abandon()
    session.claim("s", owner("carol"), LEASE, 0.0)
    session.forget_holder()
    assert not session.claimed


def test_only_the_last_owners_word_settles_what_a_claim_left(session: Session) -> None:
    session.claim("s", owner("alice"), LEASE, 0.0)
    session.start()
    session.abandon()
    assert session.orphaned, "its trainer may have died before it resumed"
    session.claim("t", owner("bob"), LEASE, 0.0)
    session.release(owner("alice"), settled=True)
    assert session.orphaned
    assert session.release(owner("bob"), settled=True)
    assert not session.orphaned


def test_a_release_that_settles_nothing_leaves_it_to_the_next_trainer(session: Session) -> None:
    session.claim("s", owner("alice"), LEASE, 0.0)
    assert session.release(owner("alice"), settled=False)
    assert session.orphaned
    assert not session.release(owner("alice"), settled=True), "there is no lease any more"
    assert not session.orphaned


@pytest.mark.parametrize("who", ["alice", "bob"])
def test_an_init_does_not_end_a_session_that_is_alive(who: str, session: Session) -> None:
    session.claim("s", owner("alice"), LEASE, 0.0)
    session.start()
    with pytest.raises(StateError if who == "alice" else LeaseError):
        session.check_init(owner(who), 9.0)
    session.check_init(owner(who), 10.0)


def test_weights_that_are_disowned_are_not_served_until_a_session_completes():
    session = Session()
    session.abandon(disown=True)
    assert (session.state, session.servable) == (State.UNUSABLE, False)
    session.start()
    session.abandon()
    assert not session.servable
    session.start()
    session.writing()
    session.finished()
    assert (session.state, session.servable) == (State.IDLE, True)
