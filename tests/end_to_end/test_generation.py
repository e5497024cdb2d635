"""What the fleet says after a push is what transformers says of the new checkpoint, and no answer mixes weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from checkpoints import scaled_weights, write_checkpoint
from end_to_end.conftest import CONFIG
from end_to_end.here import Trainer, push
from end_to_end.seen import PROMPT, answer, ask, differences, info, wait_until
from fleets import RunningServer
from oracle import Layout
from rankcast.control.http import HttpClient

LAYOUT = Layout(dp=2, tp=2, expert_parallel=True)
A, B = (scaled_weights(CONFIG, seed) for seed in (20, 21))
TOLERANCE = 2e-5
#: Long enough that a push comes in between.
MANY_TOKENS = 100

Judge = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judge]:
    """For A and B: the log-probs of every next token along a sequence, as transformers computes them."""

    def judge(name: str, weights: Any) -> Judge:
        directory = write_checkpoint(tmp_path_factory.mktemp(name), CONFIG, weights)
        model = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

        def log_probs(tokens: list[int]) -> torch.Tensor:
            with torch.no_grad():
                return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), dim=-1)

        return log_probs

    return {"A": judge("A", A), "B": judge("B", B)}


def assert_said_by(judges: dict[str, Judge], said: dict[str, Any]) -> None:
    """Each token and its log-prob are those of the weights whose version the answer gives for it."""
    sequence = PROMPT + said["token_ids"]
    scores = {version: judges[version](sequence) for version in set(said["weight_versions"])}
    for at, (token, value, version) in enumerate(
        zip(said["token_ids"], said["logprobs"], said["weight_versions"], strict=True)
    ):
        row = scores[version][len(PROMPT) + at - 1]
        assert value == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert float(row[token]) == pytest.approx(float(row.max()), abs=TOLERANCE)


@pytest.mark.parametrize("which", ["fleet", "piped"])
def test_log_probs_after_a_push_are_transformers_own_for_the_new_checkpoint_and_not_the_olds(
    request: pytest.FixtureRequest, judges: dict[str, Judge], which: str
) -> None:
    server: RunningServer = request.getfixturevalue(which)
    with Trainer(server.url, A) as trainer:
        for version, weights in (("A", A), ("B", B)):
            trainer.push(weights, version)
            for replica in range(2 if which == "fleet" else 1):
                said = answer(server.url, 4, prompt_logprobs=True, replica=replica)
                expected = {name: judge(PROMPT) for name, judge in judges.items()}
                found = torch.tensor(said["prompt_logprobs"][1:])
                places = torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])
                torch.testing.assert_close(found, expected[version][places], rtol=0, atol=TOLERANCE)
                other = expected["B" if version == "A" else "A"][places]
                assert (found - other).abs().max() > 1000 * TOLERANCE
                assert_said_by(judges, said)


class Asking:
    """Three requests for many tokens that are in flight when this is made; ``answers`` once they are over."""

    def __init__(self, url: str) -> None:
        self._found: list[Any] = []
        self._threads = [threading.Thread(target=self._one, args=(url, replica % 2)) for replica in range(3)]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: info(url)["requests"] == 3)

    def _one(self, url: str, replica: int) -> None:
        self._found.append(ask(url, MANY_TOKENS, replica=replica))

    def answers(self) -> list[dict[str, Any]]:
        for thread in self._threads:
            thread.join(60)
        assert [response.status_code for response in self._found] == [200] * 3
        return [dict(response.json()) for response in self._found]


def test_requests_in_flight_are_kept_across_a_push_and_every_token_has_its_own_version(
    fleet: RunningServer, judges: dict[str, Judge]
) -> None:
    with Trainer(fleet.url, A, pause="keep") as trainer:
        trainer.push(A, "A")
        asking = Asking(fleet.url)
        trainer.push(B, "B")
        answers = asking.answers()
    mixed = 0
    for said in answers:
        assert (len(said["token_ids"]), said["finish_reason"]) == (MANY_TOKENS, "length")
        old = said["weight_versions"].count("A")
        assert said["weight_versions"] == ["A"] * old + ["B"] * (MANY_TOKENS - old)
        assert said["weight_version"] == said["weight_versions"][-1]
        mixed += 0 < old < MANY_TOKENS
        assert_said_by(judges, said)
    assert mixed, "the push came too late or too early to show anything"
    assert differences(fleet.url, CONFIG, B, LAYOUT) == []


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_in_flight_end_under_the_old_weights_when_a_push_waits_for_them_or_aborts_them(
    fleet: RunningServer, judges: dict[str, Judge], mode: str
) -> None:
    with Trainer(fleet.url, A, pause=mode) as trainer:
        trainer.push(A, "A")
        asking = Asking(fleet.url)
        trainer.push(B, "B")
        answers = asking.answers()
    for said in answers:
        assert set(said["weight_versions"]) <= {"A"}
        if mode == "wait":
            assert (len(said["token_ids"]), said["finish_reason"]) == (MANY_TOKENS, "length")
        assert_said_by(judges, said)
    if mode == "abort":
        assert "abort" in {said["finish_reason"] for said in answers}
    assert differences(fleet.url, CONFIG, B, LAYOUT) == []
    assert set(answer(fleet.url)["weight_versions"]) == {"B"}


@pytest.mark.parametrize("mode", ["keep", "wait", "abort", None])
def test_an_engine_that_the_user_paused_stays_paused_after_a_push(fleet: RunningServer, mode: str | None) -> None:
    push(fleet.url, A, "A")
    with HttpClient(fleet.url) as client:
        client.pause("keep")
        try:
            push(fleet.url, B, "B", pause=mode)
            assert client.is_paused()
        finally:
            client.resume()
    assert differences(fleet.url, CONFIG, B, LAYOUT) == []
    assert set(answer(fleet.url)["weight_versions"]) == {"B"}
