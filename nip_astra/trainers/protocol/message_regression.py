"""A probe for messages that reveal the label.

A prover that is rewarded for the verifier's right decisions may send the answer in a code. If so,
the label can be predicted from the first message that it sends. Once an iteration:

    message_regression = MessageRegression(hyper_params, combined_agents.names)
    metrics |= message_regression.regress(batch, combined_agents, iteration)

Shapes: N frames, A agents, C channels, P positions, S symbols, L linear symbols, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot

from nip_astra.errors import ConfigurationError, UnknownNameError
from nip_astra.message_regressors.base import MessageRegressor, build_message_regressor
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.scenario_base.protocol.combined import CombinedAgents
from nip_astra.utils.seeding import derive_seed

MESSAGE, LINEAR_MESSAGE = ("agents", "message"), ("agents", "linear_message")
METRIC = "message_regression"
"""Prefix of metrics, followed by a slash and an agent's name."""


class MessageRegression:
    """Fits a regressor to the first messages of each agent, and measures its accuracy.

    Its random numbers derive from seed, iteration and agent, and leave those of the run alone.
    """

    def __init__(self, hyper_params: HyperParameters, agent_names: Sequence[str]) -> None:
        self.seed = hyper_params.seed
        self.parameters = hyper_params.message_regression
        probed = self.parameters.agents
        for name in probed or ():
            if name not in agent_names:
                advice = "message_regression.agents names some of them; null probes all."
                raise UnknownNameError("agent", name, agent_names, advice)
        self._probed = set(agent_names if probed is None else probed)
        self._kept: dict[str, MessageRegressor] = {}
        regressor = self.parameters.regressor
        self._has_kept = regressor is not None and not self.parameters.reset_on_fit
        if self._has_kept and not build_message_regressor(regressor).can_go_on:
            raise ConfigurationError(
                f"a regressor of the type {getattr(regressor, 'type_name', None)!r} cannot "
                "continue from the previous fit. Leave out message_regression.reset_on_fit, or "
                "choose mlp."
            )

    def state(self) -> dict[str, Any]:
        """Return the regressors, for a checkpoint."""
        return {name: regressor.state() for name, regressor in self._kept.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state`."""
        for name, kept in state.items():
            self._regressor(name).load_state(kept)

    def _regressor(self, name: str) -> MessageRegressor:
        if not self._has_kept:
            return build_message_regressor(self.parameters.regressor)
        if name not in self._kept:
            self._kept[name] = build_message_regressor(self.parameters.regressor)
        return self._kept[name]

    def regress(
        self, batch: TensorDictBase, combined: CombinedAgents, iteration: int
    ) -> dict[str, float]:
        """Return each agent's accuracy, and that of a guess without a message, as metrics.

        `message_regression/<agent>` and `message_regression/<agent>_baseline` are shares of right
        answers on held-out datapoints. The baseline always answers with the more common label of
        the training part. Agents with too few messages to split are left out.

        Parameters
        ----------
        batch : TensorDict
            As of `EpisodeSampler.collect`. Those frames count in which an agent sends for the first
            time in an episode.
        iteration : int
            Counted from 0; nothing is fitted unless it is a multiple of the period.
        """
        regressor, period = self.parameters.regressor, self.parameters.period
        if regressor is None or iteration % period:
            return {}
        keys: list[Any] = [*("round", "seed", "y", "datapoint_id", "active_mask"), MESSAGE]
        if combined.space.num_linear_symbols:
            keys.append(LINEAR_MESSAGE)
        frames = batch.select(*keys).flatten().to("cpu")
        is_first_NA = _sends_first(frames, combined)
        metrics: dict[str, float] = {}
        for number, name in enumerate(combined.names):
            if name not in self._probed:
                continue
            of_agent = frames[is_first_NA[:, number]]
            seed = derive_seed(self.seed, METRIC, iteration, name)
            scores = self._scores(of_agent, number, combined, torch.Generator().manual_seed(seed))
            if scores is not None:
                metrics[f"{METRIC}/{name}"], metrics[f"{METRIC}/{name}_baseline"] = scores
        return metrics

    def _scores(
        self,
        frames: TensorDictBase,
        number: int,
        combined: CombinedAgents,
        generator: torch.Generator,
    ) -> tuple[float, float] | None:
        """Return the accuracies with and without the message, if there are enough messages."""
        ids_N = frames["datapoint_id"]
        is_judged_N = self._is_judged(ids_N, generator)
        if is_judged_N is None:
            return None
        features_ND = _features(frames, number, combined)
        labels_N = frames["y"].flatten().float()
        learnt_N, judged_N = labels_N[~is_judged_N], labels_N[is_judged_N]
        regressor = self._regressor(combined.names[number])
        with torch.enable_grad():
            log_odds = regressor.fit_and_judge(
                features_ND[~is_judged_N], learnt_N, features_ND[is_judged_N], generator
            )
        accuracy = ((log_odds > 0) == judged_N.bool()).float().mean()
        commoner = (learnt_N.mean() > 0.5).float()
        return accuracy.item(), (judged_N == commoner).float().mean().item()

    def _is_judged(self, ids_N: Tensor, generator: torch.Generator) -> Tensor | None:
        """Return the held-out frames: all those of some datapoints."""
        distinct: Tensor = torch.unique(ids_N)
        if len(distinct) < 2:
            return None
        if self._has_kept:
            # By the datapoint alone: earlier training data are never judged.
            bound = self.parameters.test_share * 2**32
            key = (self.seed, METRIC, "judged")
            judged = [id_ for id_ in distinct.tolist() if derive_seed(*key, id_) % 2**32 < bound]
            if not 0 < len(judged) < len(distinct):
                return None
            return torch.isin(ids_N, torch.tensor(judged))
        count = round(self.parameters.test_share * len(distinct))
        count = min(max(count, 1), len(distinct) - 1)
        order = torch.randperm(len(distinct), generator=generator)
        return torch.isin(ids_N, distinct[order[:count]])


def _sends_first(frames: TensorDictBase, combined: CombinedAgents) -> Tensor:
    """Return where an agent sends and had no earlier turn in the episode, bool [N, A]."""
    rounds_N, seeds_N = frames["round"], frames["seed"]
    sends_NA: Tensor = frames["active_mask"].any(dim=-1)
    for earlier in range(combined.protocol.max_message_rounds - 1):
        active_NAC = combined.protocol.active_mask(torch.full_like(rounds_N, earlier), seeds_N)
        sends_NA = sends_NA & ~(active_NAC.any(dim=-1) & (earlier < rounds_N)[:, None])
    return sends_NA


def _features(frames: TensorDictBase, number: int, combined: CombinedAgents) -> Tensor:
    """Return an agent's symbols, one-hot, 0 in channels in which it sends nothing, [N, D]."""
    space = combined.space
    active_NC11 = frames["active_mask"][:, number, :, None, None]
    symbols_NCP = frames[MESSAGE][:, number]
    parts = [one_hot(symbols_NCP, space.num_symbols) * active_NC11]
    if space.num_linear_symbols:
        linear_NCP = frames[LINEAR_MESSAGE][:, number]
        parts.append(one_hot(linear_NCP, space.num_linear_symbols) * active_NC11)
    return torch.cat([part.flatten(1) for part in parts], dim=1).float()
