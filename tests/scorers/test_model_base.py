"""Scorers that run a model share a device and batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from nip_astra.errors import ConfigurationError, ParameterError, ScorerError
from nip_astra.scorers.classifier import ModelScorer, find_label
from nip_astra.utils.actors import ActorOptions, using_actors
from tests import actors_here
from tests.messages import says


class LengthScorer(ModelScorer):
    """Rates by length, and keeps its batches."""

    class Parameters(ModelScorer.Parameters):
        """None."""

    def _score(self, texts: Sequence[str]) -> list[float]:
        self.batches: list[list[str]] = []

        def rate(part: list[str]) -> torch.Tensor:
            self.batches.append(part)
            return torch.tensor([len(text) / 10 for text in part])

        return self._in_batches(texts, rate, len)


def build(**parameters: object) -> LengthScorer:
    return LengthScorer(LengthScorer.Parameters(**parameters), device=torch.device("meta"))


def test_texts_of_like_length_share_a_batch_and_scores_keep_their_order() -> None:
    scorer = build(batch_size=2)
    assert scorer.score(["aaaa", "b", "ccc", "dd"]).tolist() == pytest.approx([0.4, 0.1, 0.3, 0.2])
    assert scorer.batches == [["b", "dd"], ["ccc", "aaaa"]]


def test_no_texts_make_no_batch() -> None:
    assert build().score([]).shape == (0,)


def test_a_scorer_runs_where_the_run_does_unless_it_is_told_otherwise() -> None:
    assert build().device == torch.device("meta")
    assert build(device="cpu").device == torch.device("cpu")


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ParameterError, match="device"):
        LengthScorer.Parameters(device="gpu")


def test_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert build(device="cuda:1").device == torch.device("cuda:1")
    with pytest.raises(ConfigurationError) as caught:
        build(device="cuda:2")
    assert "device 'cuda:2': torch sees 2 GPUs, numbered from 0" in str(caught.value)


def test_a_category_that_there_is_not_is_told_with_all() -> None:
    assert find_label("b", ["a", "b"], of="it") == 1
    with pytest.raises(ConfigurationError) as caught:
        find_label("insul", ["toxicity", "insult"], of="the model 'x'", what="category")
    assert says(caught.value, "category 'insul'", "'x'", "'insult'?", "toxicity, insult")


class ModelOnActors(ModelScorer):
    """Rates by a network; refuses the text "bad"."""

    can_be_copied = True

    def __init__(self, batch_size: int) -> None:
        parameters = ModelScorer.Parameters(batch_size=batch_size)
        super().__init__(parameters, device=torch.device("cpu"))
        self.network = torch.nn.Linear(3, 1)

    def _score(self, texts: Sequence[str]) -> list[float]:
        return self._in_batches(texts, self._by_network, len)

    def _by_network(self, part: list[str]) -> torch.Tensor:
        if "bad" in part:
            raise ValueError("no such word")
        inputs = torch.tensor([[len(text), text.count("a"), len(part)] for text in part])
        return self.network(inputs.float()).sigmoid()[:, 0]


def test_actors_rate_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = actors_here.install(monkeypatch)
    texts = ["a" * length + "b" * (length % 3) for length in range(1, 12)]
    scorer = ModelOnActors(batch_size=4)
    expected = scorer.score(texts)
    scorer._verdicts.clear()
    with using_actors(ActorOptions(2)):
        assert torch.equal(scorer.score(texts), expected)
        assert opened[0].turn == 3
        # What was rated is remembered here, and one batch stays here.
        assert torch.equal(scorer.score([*texts, "c"])[:-1], expected)
        assert opened[0].turn == 3
        assert not opened[0].actors[0]._kept[0]._verdicts


def test_a_scorer_that_fails_in_an_actor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    actors_here.install(monkeypatch)
    scorer = ModelOnActors(batch_size=1)
    reason = "ValueError: no such word"
    with using_actors(ActorOptions(1)), pytest.raises(ScorerError, match=reason):
        scorer.score(["good", "bad"])


def test_a_scorer_on_a_gpu_stays_where_actors_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = actors_here.install(monkeypatch)
    scorer = ModelOnActors(batch_size=1)
    scorer.device = torch.device("cuda")
    with using_actors(ActorOptions(1)):
        scorer.score(["good", "a"])
        assert not opened
    with using_actors(ActorOptions(1, num_gpus=0.5)):
        scorer.score(["better", "aa"])
        assert opened[0].turn == 2
