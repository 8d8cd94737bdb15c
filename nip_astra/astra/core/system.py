"""The interface of problems: text generation, log-probabilities, and a reward.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, NamedTuple

import torch
from torch import Tensor

from nip_astra.astra.core.aliases import HasAliases
from nip_astra.astra.core.common import ActionT, StateT
from nip_astra.astra.logging import logger
from nip_astra.errors import ConfigurationError

MAX_LOGPROB = 1e-3
"""Nats. Larger numbers are not log-probabilities; smaller positive ones may be rounding."""


class LogprobsError(ConfigurationError, AssertionError):
    """A problem's log-probabilities cannot be used; an AssertionError, as in ASTRA-RL."""


class TokenValues(NamedTuple):
    """Log-probabilities and other values of the tokens of probes.

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
    """Return the token positions: from the first to the last nonzero log-probability.

    A text problem returns no masks, and exactly 0 at positions without a token.
    """
    is_some_BT = logprobs_BT.detach() != 0
    return (is_some_BT.cumsum(dim=1) > 0) & (is_some_BT.flip(1).cumsum(dim=1).flip(1) > 0)


class System(HasAliases, ABC, Generic[StateT, ActionT]):
    """The models under test and in training, with batched methods.

    If a method has several names, a subclass defines it under one of them.

    Parameters
    ----------
    scorer : Scorer, optional
        Rates texts; ASTRA-RL's or registered. Without one, nodes have no scores.
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
    """Maximum memory of one method call for a model's outputs over the vocabulary, as estimated
    from the lengths of the texts; more texts are split into several calls. None for no bound."""
    max_logprob: float | None = MAX_LOGPROB
    """Largest log-probability of a token that losses and rewards accept, nats. None accepts all:
    log-densities of continuous actions may exceed 0."""

    def __init__(self, scorer: Any = None) -> None:
        self.scorer = scorer
        self._expected_device: torch.device | None = None
        # Kinds of log-probabilities whose device was compared once, as in ASTRA-RL.
        self._disable_asserts: dict[str, bool] = defaultdict(bool)

    @property
    def moderator(self) -> Any:
        """Another name of `scorer`."""
        return self.scorer

    @moderator.setter
    def moderator(self, scorer: Any) -> None:
        self.scorer = scorer

    @abstractmethod
    def rollout_prompt_with_attacker(self, x: Sequence[StateT]) -> Sequence[ActionT]:
        """Generate a probe for each state, without repeating the state."""

    @abstractmethod
    def rollout_prompt_with_target(self, x: Sequence[StateT]) -> Sequence[StateT]:
        """Generate a response to each state, which ends with a probe; do not repeat the state."""

    @abstractmethod
    def get_attacker_logprobs(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> Tensor:
        """Return log p(continuation | context) under the attacker, with gradient.

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
        """Return the same under the target; called without gradient."""

    @abstractmethod
    def get_baseline_logprobs(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> Tensor:
        """Return the same under the reference, which defines ordinary text; called without
        gradient.
        """

    @abstractmethod
    def advance(self, state: StateT, action: ActionT, response: StateT) -> StateT:
        """Return the state after a probe and its response."""

    @abstractmethod
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the trained parameters."""

    @abstractmethod
    def reward(
        self, context: Sequence[StateT], probe: Sequence[ActionT], response: Sequence[StateT]
    ) -> Sequence[float]:
        """Return the reward of each probe; NaN without a verdict. Training maximises it."""

    # ---- used by algorithms

    @property
    def samples_as_it_scores(self) -> bool:
        """Whether probes are sampled with the log-probabilities of scoring; otherwise losses use
        those of scoring.
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
        """Return the attacker's values of the tokens of probes, left-aligned in each row."""
        if needs_entropy:
            raise ConfigurationError(
                f"{type(self).__name__} has no entropies, only log-probabilities. Set "
                "entropy_weight=0, or use HFASTProblem."
            )
        logprobs_BT = self.checked_logprobs("attacker", context, continuation)
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
        """Return log-probabilities under the reference, `[B, T]`, and the mask of tokens."""
        logprobs_BT = self.checked_logprobs("baseline", context, continuation)
        return logprobs_BT, token_mask(logprobs_BT)

    def checked_logprobs(
        self,
        role: Literal["attacker", "target", "baseline"],
        context: Sequence[StateT],
        continuation: Sequence[ActionT],
    ) -> Tensor:
        """Return log-probabilities under a model, `[B, T]` nats, for a loss or a reward.

        Raises
        ------
        ConfigurationError
            For another shape or type, a missing gradient, and numbers above `max_logprob`.
        """
        method = getattr(self, f"_get_{role}_logprobs_and_validate")
        logprobs_BT: Tensor = method(context, continuation)
        limit = math.inf if self.max_logprob is None else self.max_logprob
        # Also for NaN, which is no maximum of other numbers.
        if logprobs_BT.numel() and not float(logprobs_BT.detach().max()) <= limit:
            raise ConfigurationError(
                f"the {role}'s log-probabilities by {type(self).__name__} reach "
                f"{float(logprobs_BT.detach().max()):.3g}. Return nats per token, at most 0, and 0 "
                "outside the continuation; for log-densities, set max_logprob = None."
            )
        return logprobs_BT

    def _values(
        self, context: Sequence[StateT], continuation: Sequence[ActionT], logprobs_BT: Tensor
    ) -> Tensor:
        values: Tensor = self.value(context, continuation)  # type: ignore[attr-defined]
        if values.ndim == 3 and values.shape[2] == 1:
            values = values.squeeze(2)
        if values.shape != logprobs_BT.shape:
            raise ConfigurationError(
                f"the values of {type(self).__name__} have the shape {list(values.shape)}, but its "
                f"log-probabilities {list(logprobs_BT.shape)}. Return one value per token, [B, T] "
                "or [B, T, 1], at the same positions."
            )
        return values

    # ---- checked calls

    def _get_attacker_logprobs_and_validate(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> Tensor:
        logprobs = self.get_attacker_logprobs(context, continuation)
        needs_gradient = torch.is_grad_enabled()
        self._check_logprobs("tester_logprobs", logprobs, len(context), needs_gradient)
        return _with_tokens(logprobs)

    def _get_target_logprobs_and_validate(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> Tensor:
        with torch.no_grad():
            logprobs = self.get_target_logprobs(context, continuation)
        self._check_logprobs("target_logprobs", logprobs, len(context))
        return _with_tokens(logprobs)

    def _get_baseline_logprobs_and_validate(
        self, context: Sequence[StateT], continuation: Sequence[ActionT]
    ) -> Tensor:
        with torch.no_grad():
            logprobs = self.get_baseline_logprobs(context, continuation)
        self._check_logprobs("baseline_logprobs", logprobs, len(context))
        return _with_tokens(logprobs)

    def _rollout_prompt_with_attacker_and_validate(self, x: Sequence[StateT]) -> Sequence[ActionT]:
        texts = self.rollout_prompt_with_attacker(x)
        self._check_number(texts, len(x), "attacker")
        return texts

    def _rollout_prompt_with_target_and_validate(self, x: Sequence[StateT]) -> Sequence[StateT]:
        texts = self.rollout_prompt_with_target(x)
        self._check_number(texts, len(x), "target")
        return texts

    def _reward_and_validate(
        self, context: Sequence[StateT], probe: Sequence[ActionT], response: Sequence[StateT]
    ) -> list[float]:
        rewards = [float(reward) for reward in self.reward(context, probe, response)]
        self._check_number(rewards, len(probe), "reward")
        return rewards

    def _target_input(self, state: StateT, action: ActionT) -> StateT:
        """Return the state with the probe appended, as input of the target."""
        return state + action  # type: ignore[operator, no-any-return]  # texts, or like texts

    def _advance_and_validate(self, state: StateT, action: ActionT, response: StateT) -> StateT:
        return self.advance(state, action, response)

    def _check_logprobs(
        self, check_key: str, logprobs: Any, ctx_length: int, requires_grad: bool = False
    ) -> None:
        """Check type, shape and gradient of log-probabilities, and at first their device.

        Parameters
        ----------
        check_key : str
            The kind of log-probabilities, for instance `tester_logprobs`.
        ctx_length : int
            Number of rows.

        Raises
        ------
        LogprobsError
            If a loss could not be computed from them.
        """
        owner = type(self).__name__
        if not isinstance(logprobs, Tensor):
            problem = f"are a {type(logprobs).__name__}"
        elif logprobs.ndim not in (1, 2) or logprobs.shape[0] != ctx_length:
            problem = f"have the shape {list(logprobs.shape)}"
        else:
            problem = ""
        if problem:
            raise LogprobsError(
                f"{check_key} of {ctx_length} texts by {owner} {problem}. Return a tensor [B, T] "
                "of nats per token, 0 outside the continuation."
            )
        if requires_grad and not logprobs.requires_grad:
            raise LogprobsError(
                f"{check_key} of {owner} have no gradient. Compute them outside torch.no_grad(), "
                "with parameters that require gradients."
            )
        if self._disable_asserts[check_key]:
            return
        expected = self._expected_device or logprobs.device
        if logprobs.device != expected:
            raise LogprobsError(
                f"All logprobs must be on the same device. Expected {expected}, but {check_key} "
                f"logprobs are on {logprobs.device}. Make sure that the models (tester, target, "
                "baseline) are on the same device."
            )
        if logprobs.numel() and bool(((logprobs >= 0) & (logprobs <= 1)).all()):
            logger.warning(
                "%s of %s lie between 0 and 1, as probabilities do; return their logarithms",
                check_key,
                owner,
            )
        self._expected_device = expected
        self._disable_asserts[check_key] = True

    def _check_number(self, texts: Any, num_rows: int, who: str) -> None:
        if isinstance(texts, str) or not hasattr(texts, "__len__") or len(texts) != num_rows:
            given = f"{len(texts)}" if hasattr(texts, "__len__") else f"a {type(texts).__name__}"
            raise ConfigurationError(
                f"the {who} of {type(self).__name__} returned {given} for {num_rows} texts. "
                "Return one for each, in order, as a list."
            )


def _with_tokens(logprobs: Tensor) -> Tensor:
    """Return `[B]` sums as `[B, 1]`."""
    return logprobs.unsqueeze(1) if logprobs.ndim == 1 else logprobs


def _check_places(values_BT: Tensor, mask_BT: Tensor, *, of: str) -> None:
    """Raise for values that are shifted one position behind their tokens.

    A mask that is not shifted with the log-probabilities hides only the value before the first
    token of every row.
    """
    is_first_BT = mask_BT & (mask_BT.cumsum(dim=1) == 1)
    is_later_BT = mask_BT & ~is_first_BT
    is_some_BT = values_BT.detach() != 0
    if is_later_BT.any() and not is_some_BT[is_first_BT].any() and is_some_BT[is_later_BT].all():
        raise ConfigurationError(
            f"the values of {of} are masked one position too far: they are 0 before the first "
            "token of every probe, and only there. Mask them like the log-probabilities, "
            "values[:, :-1].masked_fill(~mask[:, 1:], 0), where mask marks the input tokens of "
            "the continuation."
        )


class ValueFunctionSystem(System[StateT, ActionT], ABC):
    """A problem with a value function, as PPO requires."""

    @abstractmethod
    def value(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """Return the expected return before each token of the continuation, with gradient.

        Returns
        -------
        Tensor
            Of the shape of `get_attacker_logprobs`, `[B, T]` or `[B, T, 1]`: each value at the
            position of its token's log-probability.
        """


Problem = System
TrainableSystem = System
ValueFunctionProblem = ValueFunctionSystem
