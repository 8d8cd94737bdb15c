"""Problems small enough to verify by hand: words in place of language models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nip_astra.astra import (
    ASTProblem,
    ASTSampler,
    HFASTProblem,
    Scorer,
    Trainer,
    TrainingConfiguration,
    ValueFunctionSystem,
)

WORDS = ("hello", "cat", "mat", "silly", "you", "sat")
PROMPTS = ["hello", "good day", "how are you", "the cat sat"]
SHORT = {"max_new_tokens": 6}


class Finds(Scorer[str, str]):
    """1 for a text that contains a word."""

    def __init__(self, word: str = "silly") -> None:
        self.word = word
        self.calls: list[int] = []

    def score(self, x: Sequence[str]) -> list[float]:
        self.calls.append(len(x))
        return [float(self.word in text.split()) for text in x]


class Speaker(torch.nn.Module):
    """Draws words from a single distribution, which it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(len(WORDS)))

    def save_pretrained(self, directory: str | Path) -> None:
        torch.save(self.state_dict(), Path(directory) / "speaker.pt")


class WordProblem(ASTProblem):
    """An attacker that generates two words, and a target that repeats them.

    Log-probabilities follow two positions of context and precede padding, as those of a
    language model do.
    """

    def __init__(self, scorer: Any = None, **weights: Any) -> None:
        super().__init__(scorer if scorer is not None else Finds(), **weights)
        self.attacker = Speaker()
        self.tokenizer = None
        self.requests: list[tuple[str, int]] = []

    def rollout_prompt_with_attacker(self, x: Sequence[str]) -> list[str]:
        self.requests.append(("attacker", len(x)))
        words = torch.multinomial(self.attacker.logits.softmax(0).repeat(len(x), 1), 2, True)
        return [f" {WORDS[first]} {WORDS[second]}" for first, second in words.tolist()]

    def rollout_prompt_with_target(self, x: Sequence[str]) -> list[str]:
        self.requests.append(("target", len(x)))
        return [f" you said {' '.join(text.split()[-2:])}" for text in x]

    def _logprobs(self, logits: Tensor, continuation: Sequence[str]) -> Tensor:
        ids = torch.tensor([[WORDS.index(word) for word in text.split()] for text in continuation])
        result = logits.log_softmax(0)[ids]
        return torch.nn.functional.pad(result, (2, 1))

    def get_attacker_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return self._logprobs(self.attacker.logits, continuation)

    def get_target_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return self._logprobs(torch.zeros(len(WORDS)), continuation)

    def get_baseline_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return self._logprobs(torch.zeros(len(WORDS)), continuation)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.attacker.parameters()


class ValuedWordProblem(WordProblem, ValueFunctionSystem):
    """The same with a value function: a value wherever there is a log-probability."""

    has_last_dimension = False

    def __init__(self, scorer: Any = None, **weights: Any) -> None:
        super().__init__(scorer, **weights)
        self.guess = torch.nn.Parameter(torch.zeros(()))

    def value(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        values = self.guess.expand(len(context), 5)
        return values.unsqueeze(2) if self.has_last_dimension else values

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        yield from self.attacker.parameters()
        yield self.guess


def hf_problem(
    models: Any, scorer: Any = None, kind: type[HFASTProblem] = HFASTProblem, **options: Any
) -> HFASTProblem:
    """A problem of the tiny models."""
    values = {"attacker_options": SHORT, "target_options": SHORT, **options}
    scorer = Finds("cat") if scorer is None else scorer
    return kind(str(models.attacker), str(models.target), scorer=scorer, **values)


def train(algorithm: Any, sampler: Any = None, **config: Any) -> Trainer:
    """A trainer after its training, by default on trees of the prompts."""
    sampler = sampler or ASTSampler(algorithm.problem, PROMPTS)
    trainer = Trainer(TrainingConfiguration(**config), sampler, algorithm)
    trainer.train()
    return trainer


def says(problem: ASTProblem, word: str) -> float:
    """The attacker's probability of a word in a word problem."""
    return float(problem.attacker.logits.detach().softmax(0)[WORDS.index(word)])


def texts_of(graph: Any) -> list[Any]:
    """All texts of a graph, in the shape of its tree."""
    return [[n.context, n.probe, n.response, n.reward, texts_of(n)] for n in graph.children]
