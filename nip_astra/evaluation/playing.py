"""Play an attacker against a target and write every turn down, so that a kill loses one part."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from nip_astra.evaluation.failure_probability import REFERENCE, defensive_shares
from nip_astra.evaluation.failures import play_episodes
from nip_astra.evaluation.proposals import sampled_logprobs, sampler_of, why_inexact
from nip_astra.evaluation.rating import rate_by_others, rate_probes
from nip_astra.evaluation.rows import Episode, Row, RowFile, episodes_of
from nip_astra.evaluation.storage import EvaluationFolder
from nip_astra.language_models.base import Generation, TokenScorer
from nip_astra.rl_objectives.rewards import ast_reward, mean_nll
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.agents import ConversationAgent, Speaker
from nip_astra.scenario_base.chat_agent import ChatAgent
from nip_astra.scorers.base import Scorer
from nip_astra.utils.seeding import derived_generator

ROLES = ("attacker", "target", "reference")


@dataclass(frozen=True)
class EvaluationOptions:
    """What an evaluation plays, and how its figures are made.

    Attributes
    ----------
    split : str
        Opening prompts: train, dev or test. Part of the key of all randomness.
    num_episodes : int
        Conversations of the attacker; prompts are used in order, again from the first.
    num_probability_episodes : int
        Conversations for the probability of failure under the reference; 0 for none.
    use_importance_sampling : bool
        Whether half of those have one turn of the attacker's.
    batch_size : int
        Episodes played at once; changes no result.
    """

    split: str
    seed: int
    num_episodes: int
    num_probability_episodes: int
    use_importance_sampling: bool
    num_turns: int
    failure_threshold: float
    batch_size: int = 256
    level: float = 0.95
    num_bootstrap_resamples: int = 2000


class Player:
    """Plays conversations part by part into an evaluation's folder.

    Parameters
    ----------
    sampler : TreeSampler
        Attacker, target, reference, first scorer and reward.
    others : Mapping[str, Scorer]
        Further scorers, by name.
    on_part : Callable[[int], None]
        Told the number of episodes whenever some are done.
    """

    def __init__(
        self,
        sampler: TreeSampler,
        others: Mapping[str, Scorer],
        prompts: Sequence[str],
        options: EvaluationOptions,
        folder: EvaluationFolder,
        on_part: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.sampler = sampler
        self.others = others
        self.prompts = prompts
        self.options = options
        self.folder = folder
        self.on_part = on_part

    def play_attacker(self) -> list[Episode]:
        """The attacker's episodes, those played before a kill included."""
        options = self.options
        file = self.folder.rows(options.num_turns)
        done = file.recover()
        self.on_part(done)
        sampler = _with_target_likelihood(self.sampler)
        for first in range(done, options.num_episodes, options.batch_size):
            episodes = range(first, min(first + options.batch_size, options.num_episodes))
            with self._part("attacker", episodes) as (part, spent):
                # The key of the trainer's own table, so that both show the same conversations.
                tree = play_episodes(
                    sampler,
                    self.prompts,
                    episodes,
                    num_turns=options.num_turns,
                    key=(options.seed, "evaluate", options.split),
                )
                rows = self._rows(tree, file, first)
                chains = episodes_of(rows)
                spent["scorer_calls"] = 2 * len(rows) + rate_probes(chains, self.sampler.scorer)
                spent["scorer_calls"] += rate_by_others(chains, self.others)
            self._keep(file, chains, part)
        return episodes_of(file.read())

    def play_probability(self) -> list[Episode]:
        """The episodes of the reference and of the mixture with the attacker."""
        options = self.options
        file = self.folder.probability_rows(options.num_turns)
        done = file.recover()
        self.on_part(done)
        order = self._prompt_order()
        for proposal, start, stop in self._proposals():
            sampler = sampler_of(proposal, self.sampler, num_turns=options.num_turns)
            for first in range(max(start, done), stop, self._uncut_batch()):
                episodes = range(first, min(first + self._uncut_batch(), stop))
                with self._part(proposal, episodes) as (part, spent):
                    tree = play_episodes(
                        sampler,
                        order,
                        episodes,
                        num_turns=options.num_turns,
                        key=(options.seed, "probability", options.split, proposal),
                    )
                    rows = self._rows(tree, file, first, proposal=proposal)
                    self._weigh(tree, rows)
                    spent["scorer_calls"] = 2 * len(rows)
                self._keep(file, episodes_of(rows), part)
        return episodes_of(file.read())

    def why_not_weighed(self) -> str | None:
        """Say why importance weights cannot be exact; None where they are."""
        return why_inexact([self.sampler.attacker, self.sampler.reference])

    def _proposals(self) -> Iterator[tuple[str, int, int]]:
        """Each proposal with its first episode and the one after its last."""
        number = self.options.num_probability_episodes
        counts = {REFERENCE: number}
        if self.options.use_importance_sampling and self.why_not_weighed() is None:
            counts = defensive_shares(number, self.options.num_turns)
        start = 0
        for proposal, count in counts.items():
            yield proposal, start, start + count
            start += count

    def _prompt_order(self) -> list[str]:
        """Shuffle the prompts, so that no proposal has the first ones of the file."""
        generator = derived_generator(self.options.seed, "probability prompts", self.options.split)
        order = torch.randperm(len(self.prompts), generator=generator).tolist()
        return [self.prompts[i] for i in order]

    def _uncut_batch(self) -> int:
        """The episodes whose caches fit into memory together; a proposal is not divided."""
        if self.sampler.max_cache_bytes is None:
            return self.options.batch_size
        longest = [max(self.prompts, key=len)]
        fitting = self.sampler.num_at_once(longest, tree_width=1, tree_depth=self.options.num_turns)
        return min(self.options.batch_size, fitting)

    def _rows(self, tree: RolloutTree, file: RowFile, first: int, **columns: Any) -> list[Row]:
        """A tree's nodes as rows, numbered through the file, each episode's in order."""
        length = file.episode_length
        sampler = self.sampler
        likelihoods = _target_likelihoods(tree, sampler) if not columns else {}
        rows: list[Row] = []
        for index, row in enumerate(tree.rows()):
            episode, depth = first + row["episode"], row["depth"]
            node = episode * length + depth
            row |= {
                "step": 0,
                "episode": episode,
                "node": node,
                "parent": node - 1 if depth else -1,
                "response_num_tokens": sampler.target.num_tokens(row["response"]),
                **{name: column[index] for name, column in likelihoods.items()},
                **columns,
            }
            rows.append(row)
        return rows

    def _weigh(self, tree: RolloutTree, rows: Sequence[Row]) -> None:
        """Write the log-probability of each probe under both of the mixture's speakers."""
        if self.why_not_weighed() is not None or not self.options.use_importance_sampling:
            return
        for role in ("attacker", "reference"):
            agent = getattr(self.sampler, role)
            logprobs_N = sampled_logprobs(
                agent.token_scorer(to="weigh probes"), tree, agent.sampling
            )
            for row, value in zip(rows, logprobs_N.tolist(), strict=True):
                row[f"{role}_sampled_logprob"] = value

    def _part(self, table: str, episodes: range) -> _Part:
        return _Part(self.sampler, table, episodes)

    def _keep(self, file: RowFile, chains: Sequence[Episode], part: Mapping[str, Any]) -> None:
        file.append([row for chain in chains for row in chain])
        self.folder.note_part(part)
        self.on_part(len(chains))


class _Part:
    """Counts what a part of the work takes."""

    def __init__(self, sampler: TreeSampler, table: str, episodes: range) -> None:
        self._models = {id(m): m for m in (getattr(sampler, r).language_model for r in ROLES)}
        self._stack = ExitStack()
        self.record: dict[str, Any] = {
            "table": table,
            "first_episode": episodes.start,
            "num_episodes": len(episodes),
        }
        self.spent: dict[str, int] = {}

    def __enter__(self) -> tuple[dict[str, Any], dict[str, int]]:
        self._counts = [self._stack.enter_context(m.counting()) for m in self._models.values()]
        self._started = time.perf_counter()
        self._stack.enter_context(torch.no_grad())
        return self.record, self.spent

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self.record |= {
            "seconds": time.perf_counter() - self._started,
            "tokens_generated": sum(count.generated for count in self._counts),
            "tokens_forwarded": sum(count.forwarded for count in self._counts),
            **self.spent,
        }


def _tells_likelihood(target: Speaker) -> bool:
    """Say whether a target tells how likely it finds what it reads.

    A chat model does not, nor does an engine that holds an adapter.
    """
    model = target.language_model
    return isinstance(model, TokenScorer) and model.can_score_contexts


def _with_target_likelihood(sampler: TreeSampler) -> TreeSampler:
    """A sampler that learns from the target's own pass how likely it finds the probes.

    Where it does not tell, the sampler as it is.
    """
    if not _tells_likelihood(sampler.target):
        return sampler
    found = sampler.with_attacker(sampler.attacker)
    found.reward = sampler.reward.model_copy(update={"likelihood_model": "target"})
    return found


def _target_likelihoods(tree: RolloutTree, sampler: TreeSampler) -> dict[str, list[Any]]:
    """Return the target's log-probability of each probe, and set what depends on the likelihood.

    The tree was played with the target's likelihood; reward and `probe_nll` become those of the
    scenario's own reward.
    """
    if isinstance(sampler.target, ChatAgent) or not _tells_likelihood(sampler.target):
        return {}
    nodes, reward = tree.nodes, sampler.reward
    lengths = _lengths_for_target(tree, sampler.reader, sampler.target)
    nll = nodes["probe_nll"].tolist()
    found: dict[str, list[Any]] = {
        "target_logprob": [-n * k for n, k in zip(nll, lengths, strict=True)],
        "target_num_tokens": lengths,
    }
    if reward.likelihood_model == "target":
        return found
    nll_N = mean_nll(nodes["reference_logprobs"], nodes["probe_mask"])
    combined_N = nodes["combined_score"]
    rewards_N = ast_reward(
        nodes["response_score"],
        torch.zeros_like(combined_N) if reward.w_combined == 0 else combined_N,
        nll_N,
        nodes["is_empty"],
        w_response=reward.w_response,
        w_combined=reward.w_combined,
        w_likelihood=reward.w_likelihood,
        empty_nll=math.log(len(sampler.reference.language_model.tokenizer)),
    )
    return found | {"reward": rewards_N.tolist(), "probe_nll": nll_N.tolist()}


def _lengths_for_target(
    tree: RolloutTree, attacker: ConversationAgent, target: ConversationAgent
) -> list[int]:
    """The tokens of each probe as the target read it."""
    if not attacker.shares_tokens_with(target):
        return [len(target.conversation_format.encode(probe)) for probe in tree.probes]
    nodes = tree.nodes
    said = Generation(nodes["probe"], nodes["probe_mask"], nodes["probe_logprobs"])
    return [len(ids) for ids in attacker.content_ids(said)]
