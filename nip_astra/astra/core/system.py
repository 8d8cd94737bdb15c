"""What a problem must offer: models that speak, log-probabilities, and a reward.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from nip_astra.astra.core.aliases import HasAliases
from nip_astra.astra.core.common import ActionT, StateT
from nip_astra.errors import ConfigurationError

MAX_LOGPROB = 1e-3
"""Nats. Above it a number is not a log-probability; below it may be rounding."""


class TokenValues(NamedTuple):
    """Log-probabilities of the tokens of probes, and more of each token.

    Attributes
    ----------
    logprobs_BT : Tensor
        Nats, with gradient, right-padded with 0.
    mask_BT : Tensor
        bool; True on tokens of the probe.
    values_BT : Tensor or None
        Return expected before each token, with gradient.
    entropy_BT : Tensor or None
        Of the distribution that each token was drawn from, nats.
    """

    logprobs_BT: Tensor
    mask_BT: Tensor
    values_BT: Tensor | None = None
    entropy_BT: Tensor | None = None


def token_mask(logprobs_BT: Tensor) -> Tensor:
    """Say which positions hold a token: from the first log-probability that is not 0 to the last.

    A problem of texts gives no masks, and puts exactly 0 where there is no token.
    """
    is_some_BT = logprobs_BT.detach() != 0
    return (is_some_BT.cumsum(dim=1) > 0) & (is_some_BT.flip(1).cumsum(dim=1).flip(1) > 0)


class System(HasAliases, ABC, Generic[StateT, ActionT]):
    """The models under test and in training, behind methods that take and give whole batches.

    Where a method has several names, a subclass defines it under one of them.

    Parameters
    ----------
    scorer : Scorer, optional
        What rates texts, of ASTRA's kind or a registered one; without it no node has a score.
    """

    _aliases = tuple(
        tuple(pattern.format(role) for role in ("attacker", "tester", "auditor"))
        for pattern in (
            "rollout_prompt_with_{}",
            "get_{}_logprobs",
            "_rollout_prompt_with_{}_and_validate",
            "_get_{}_logprobs_and_validate",
        )
    )

    max_batch_bytes: int | None = 4 * 2**30
    """Memory that one call of a method may take for what a model says of every token of a
    vocabulary, as estimated from the lengths of the texts; more texts are given in several calls.
    None for no bound."""

    def __init__(self, scorer: Any = None) -> None:
        self.scorer = scorer

    @property
    def moderator(self) -> Any:
        """Another name of `scorer`."""
        return self.scorer

    @moderator.setter
    def moderator(self, scorer: Any) -> None:
        self.scorer = scorer

    @abstractmethod
    def rollout_prompt_with_attacker(self, x: Sequence[StateT]) -> Sequence[ActionT]:
        """Say a probe to each state; without repeating the state."""

    @abstractmethod
    def rollout_prompt_with_target(self, x: Sequence[StateT]) -> Sequence[StateT]:
        """Answer each state, which ends with a probe; without repeating the state."""

    @abstractmethod
    def get_attacker_logprobs(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> Tensor:
        """Log-probability log p(continuation | context) under the attacker, with gradient.

        Returns
        -------
        Tensor
            `[B, T]`, nats per token, exactly 0 outside the continuation; or `[B]`,
            sums over tokens, which PPO cannot learn from token by token.
        """

    @abstractmethod
    def get_target_logprobs(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> Tensor:
        """The same under the target; called without gradient."""

    @abstractmethod
    def get_baseline_logprobs(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> Tensor:
        """The same under the reference, the measure of what is ordinary; called without
        gradient.
        """

    @abstractmethod
    def advance(self, state: StateT, action: ActionT, response: StateT) -> StateT:
        """The state after a probe and the response to it."""

    @abstractmethod
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """What training changes."""

    @abstractmethod
    def reward(
        self, context: Sequence[StateT], probe: Sequence[ActionT], response: Sequence[StateT]
    ) -> Sequence[float]:
        """What each probe earns; NaN where there is no verdict. Training seeks larger ones."""

    # ---- what algorithms ask

    @property
    def samples_as_it_scores(self) -> bool:
        """Whether probes come with the log-probabilities that scoring would give them; where they
        do not, a loss compares with those of scoring.
        """
        return True

    def token_values(
        self,
        context: Sequence[StateT],
        continuation: Sequence[ActionT],
        *,
        needs_values: bool = False,
        needs_entropy: bool = False,
    ) -> TokenValues:
        """What the attacker thinks of the tokens of probes, those at the front of each row."""
        if needs_entropy:
            raise ConfigurationError(
                f"{type(self).__name__} has no entropies, only log-probabilities. Set "
                "entropy_weight=0, or use HFASTProblem."
            )
        logprobs_BT = self._get_attacker_logprobs_and_validate(context, continuation)
        mask_BT = token_mask(logprobs_BT)
        values_BT = None
        if needs_values:
            values_BT = self._values(context, continuation, logprobs_BT)
            _check_places(values_BT, mask_BT, of=type(self).__name__)
        order_BT = mask_BT.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        return TokenValues(
            logprobs_BT.gather(1, order_BT) * mask_BT.gather(1, order_BT),
            mask_BT.gather(1, order_BT),
            None if values_BT is None else values_BT.gather(1, order_BT),
        )

    def reference_values(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities under the reference `[B, T]`, and which of them are of tokens."""
        logprobs_BT = self._get_baseline_logprobs_and_validate(context, continuation)
        return logprobs_BT, token_mask(logprobs_BT)

    def _values(
        self, context: Sequence[StateT], continuation: Sequence[ActionT], logprobs_BT: Tensor
    ) -> Tensor:
        values: Tensor = self.value(context, continuation)  # type: ignore[attr-defined]
        if values.ndim == 3 and values.shape[2] == 1:
            values = values.squeeze(2)
        if values.shape != logprobs_BT.shape:
            raise ConfigurationError(
                f"the values of {type(self).__name__} were to stand where its log-probabilities "
                f"of shape {list(logprobs_BT.shape)} do, but have the shape {list(values.shape)}. "
                "Give one value before each token, [B, T] or [B, T, 1], in the same places."
            )
        return values

    # ---- the same, checked at every call

    def _get_attacker_logprobs_and_validate(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> Tensor:
        logprobs = self.get_attacker_logprobs(context, continuation)
        if torch.is_grad_enabled() and isinstance(logprobs, Tensor) and not logprobs.requires_grad:
            raise ConfigurationError(
                f"the attacker's log-probabilities of {type(self).__name__} have no gradient. "
                "Compute them outside torch.no_grad(), with parameters that require gradients."
            )
        return self._checked(logprobs, len(context), "attacker")

    def _get_target_logprobs_and_validate(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> Tensor:
        with torch.no_grad():
            logprobs = self.get_target_logprobs(context, continuation)
        return self._checked(logprobs, len(context), "target")

    def _get_baseline_logprobs_and_validate(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> Tensor:
        with torch.no_grad():
            logprobs = self.get_baseline_logprobs(context, continuation)
        return self._checked(logprobs, len(context), "baseline")

    def _rollout_prompt_with_attacker_and_validate(self, x: Sequence[StateT]) -> Sequence[ActionT]:
        said = self.rollout_prompt_with_attacker(x)
        self._check_number(said, len(x), "attacker")
        return said

    def _rollout_prompt_with_target_and_validate(self, x: Sequence[StateT]) -> Sequence[StateT]:
        said = self.rollout_prompt_with_target(x)
        self._check_number(said, len(x), "target")
        return said

    def _asked_of_target(self, state: StateT, action: ActionT) -> StateT:
        """The state with a probe at its end, as the target is to answer it."""
        return state + action  # type: ignore[operator, no-any-return]  # texts, or like texts

    def _advance_and_validate(self, state: StateT, action: ActionT, response: StateT) -> StateT:
        return self.advance(state, action, response)

    def _checked(self, logprobs: Any, num_rows: int, who: str) -> Tensor:
        """Log-probabilities as `[B, T]`, checked."""
        problem = ""
        if not isinstance(logprobs, Tensor):
            problem = f"are a {type(logprobs).__name__}"
        elif logprobs.ndim not in (1, 2) or logprobs.shape[0] != num_rows:
            problem = f"have the shape {list(logprobs.shape)}"
        elif logprobs.numel() and float(logprobs.detach().max()) > MAX_LOGPROB:
            problem = f"reach {float(logprobs.detach().max()):.3g}"
        if problem:
            raise ConfigurationError(
                f"the {who}'s log-probabilities of {num_rows} texts by {type(self).__name__} "
                f"{problem}. Return a tensor [B, T] of nats per token, at most 0, and 0 outside "
                "the continuation."
            )
        checked: Tensor = logprobs
        return checked.unsqueeze(1) if checked.ndim == 1 else checked

    def _check_number(self, said: Any, num_rows: int, who: str) -> None:
        if isinstance(said, str) or not hasattr(said, "__len__") or len(said) != num_rows:
            given = f"{len(said)}" if hasattr(said, "__len__") else f"a {type(said).__name__}"
            raise ConfigurationError(
                f"{type(self).__name__} was asked to let the {who} speak to {num_rows} texts, but "
                f"gave {given}. Give one text for each, in order, as a list."
            )


def _check_places(values_BT: Tensor, mask_BT: Tensor, *, of: str) -> None:
    """Refuse values that stand one position behind their tokens.

    A mask that is not shifted with the log-probabilities hides the value before the first token of
    every row, and that one alone.
    """
    is_first_BT = mask_BT & (mask_BT.cumsum(dim=1) == 1)
    is_later_BT = mask_BT & ~is_first_BT
    is_some_BT = values_BT.detach() != 0
    if is_later_BT.any() and not is_some_BT[is_first_BT].any() and is_some_BT[is_later_BT].all():
        raise ConfigurationError(
            f"the values of {of} were to stand where the log-probabilities of the same tokens do, "
            "but before the first token of every probe there is 0, and before all others there is "
            "not: they are hidden by a mask that stands one position further. Mask the values as "
            "the log-probabilities: values[:, :-1].masked_fill(~mask[:, 1:], 0), where mask says "
            "which of the tokens read are of the continuation."
        )


class ValueFunctionSystem(System[StateT, ActionT], ABC):
    """A problem with a value function, as PPO needs it."""

    @abstractmethod
    def value(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """The return expected before each token of the continuation, with gradient.

        Returns
        -------
        Tensor
            Of the shape of `get_attacker_logprobs`, `[B, T]` or `[B, T, 1]`: a value stands where
            the log-probability of its token stands.
        """


Problem = System
TrainableSystem = System
ValueFunctionProblem = ValueFunctionSystem
