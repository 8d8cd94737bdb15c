"""Sampling and rating of conversations in parts, so that an interruption loses at most one part.

Conversations depend on the speakers, prompts, turns and seed, and not on the scorers: an evaluation
with another scorer reuses those of the run's other evaluations.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import NipAstraError
from nip_astra.evaluation.failure_probability import REFERENCE, attacker_turns, defensive_shares
from nip_astra.evaluation.storage import (
    CONFIGURATION,
    Episode,
    EvaluationFolder,
    Row,
    RowFile,
    episodes_of,
)
from nip_astra.language_models.base import (
    Generation,
    GenerationSession,
    SamplingOptions,
    TokenSampler,
    TokenScorer,
    Turns,
    as_sampler,
    pad_left,
)
from nip_astra.language_models.services.reasons import is_error
from nip_astra.rl_objectives.rewards import ast_reward, mean_nll
from nip_astra.rollouts.messages import Turn, calls_of_plain
from nip_astra.rollouts.prompts import columns_of_record
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.chat_agent import ChatAgent, TextAttacker
from nip_astra.scorers.base import Exchange, Scorer
from nip_astra.utils.seeding import SeedPart, derived_generator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of an evaluation's conversations and figures.

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
    """Samples an evaluation's conversations part by part into its folder.

    Parameters
    ----------
    sampler : TreeSampler
        Attacker, target, reference, first scorer and reward.
    others : Mapping[str, Scorer]
        Further scorers, by name.
    on_part : Callable[[int], None]
        Called with the number of episodes of each part.
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
        self.why_not_weighed = why_inexact([sampler.attacker, sampler.reference])
        """Why importance weights cannot be exact; None if they are."""

    def play_attacker(self) -> list[Episode]:
        """Return the attacker's episodes, including those played before an interruption."""
        options = self.options
        file = self.folder.rows(options.num_turns)
        done = file.recover()
        self.on_part(done)
        sampler = _with_target_likelihood(self.sampler)
        # The key of the trainer's own table, so that both show the same conversations.
        key = (options.seed, "evaluate", options.split)
        for first in range(done, options.num_episodes, options.batch_size):
            episodes = range(first, min(first + options.batch_size, options.num_episodes))
            with self._part(file, "attacker", episodes) as (part, rows):
                tree = play_episodes(
                    sampler, self.prompts, episodes, num_turns=options.num_turns, key=key
                )
                rows += self._rows(tree, first)
                chains = episodes_of(rows)
                rate_probes(chains, self.sampler.scorer)
                rate_by_others(chains, self.others)
                part["scorer_calls"] = len(rows) * (3 + len(self.others))
        return episodes_of(file.read())

    def play_probability(self) -> list[Episode]:
        """Return the episodes of the reference and of the mixture with the attacker."""
        options = self.options
        file = self.folder.probability_rows(options.num_turns)
        done = file.recover()
        self.on_part(done)
        # Shuffled, so that no proposal has the first prompts of the file.
        generator = derived_generator(options.seed, "probability prompts", options.split)
        order = torch.randperm(len(self.prompts), generator=generator).tolist()
        prompts = [self.prompts[i] for i in order]
        size = self._uncut_batch()
        counts = {REFERENCE: options.num_probability_episodes}
        is_weighed = options.use_importance_sampling and self.why_not_weighed is None
        if is_weighed:
            counts = defensive_shares(options.num_probability_episodes, options.num_turns)
        stop = 0
        for proposal, count in counts.items():
            start, stop = stop, stop + count
            sampler = sampler_of(proposal, self.sampler, num_turns=options.num_turns)
            key = (options.seed, "probability", options.split, proposal)
            for first in range(max(start, done), stop, size):
                episodes = range(first, min(first + size, stop))
                with self._part(file, proposal, episodes) as (part, rows):
                    tree = play_episodes(
                        sampler, prompts, episodes, num_turns=options.num_turns, key=key
                    )
                    rows += self._rows(tree, first, proposal=proposal)
                    if is_weighed:
                        self._weigh(tree, rows)
                    part["scorer_calls"] = 2 * len(rows)
        return episodes_of(file.read())

    def _uncut_batch(self) -> int:
        """Return the number of episodes whose caches fit in memory together."""
        if self.sampler.max_cache_bytes is None:
            return self.options.batch_size
        longest = [max(self.prompts, key=len)]
        fitting = self.sampler.num_at_once(longest, tree_width=1, tree_depth=self.options.num_turns)
        return min(self.options.batch_size, fitting)

    def _rows(self, tree: RolloutTree, first: int, **columns: Any) -> list[Row]:
        """Return a tree's nodes as rows, numbered through the file, each episode's in order."""
        length, sampler = self.options.num_turns, self.sampler
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
        """Write each probe's log-probability under attacker and reference."""
        for role in ("attacker", "reference"):
            agent = getattr(self.sampler, role)
            scorer = agent.token_scorer(to="weigh probes")
            logprobs_N = sampled_logprobs(scorer, tree, agent.sampling)
            for row, value in zip(rows, logprobs_N.tolist(), strict=True):
                row[f"{role}_sampled_logprob"] = value

    @contextmanager
    def _part(
        self, file: RowFile, table: str, episodes: range
    ) -> Iterator[tuple[dict[str, Any], list[Row]]]:
        """Measure the seconds and tokens of one part, and append its rows to the file."""
        speakers = (self.sampler.attacker, self.sampler.target, self.sampler.reference)
        models = {id(one.language_model): one.language_model for one in speakers}
        part: dict[str, Any] = {
            "table": table,
            "first_episode": episodes.start,
            "num_episodes": len(episodes),
        }
        rows: list[Row] = []
        with ExitStack() as stack:
            counts = [stack.enter_context(model.counting()) for model in models.values()]
            started = time.perf_counter()
            stack.enter_context(torch.no_grad())
            yield part, rows
        part |= {
            "seconds": time.perf_counter() - started,
            "tokens_generated": sum(count.generated for count in counts),
            "tokens_forwarded": sum(count.forwarded for count in counts),
        }
        file.append([row for chain in episodes_of(rows) for row in chain])
        self.folder.note_part(part)
        self.on_part(len(episodes))


def play_chains(
    sampler: TreeSampler,
    prompts: Sequence[str],
    *,
    num_episodes: int,
    batch_size: int,
    tree_depth: int,
    key: tuple[SeedPart, ...],
    parts: Iterable[int],
) -> Iterable[RolloutTree]:
    """Sample the given batches (`parts`) of `num_episodes` conversations without branches."""
    for part in parts:
        start = part * batch_size
        episodes = range(start, min(start + batch_size, num_episodes))
        if len(episodes) > 0:
            yield play_episodes(sampler, prompts, episodes, num_turns=tree_depth, key=key)


def play_episodes(
    sampler: TreeSampler,
    prompts: Sequence[str],
    episodes: range,
    *,
    num_turns: int,
    key: tuple[SeedPart, ...],
) -> RolloutTree:
    """Sample conversations without branches.

    Episode i starts from prompt i, modulo the number of prompts; it does not depend on the other
    episodes of the call.
    """
    return sampler.sample(
        [prompts[episode % len(prompts)] for episode in episodes],
        tree_width=1,
        tree_depth=num_turns,
        key=key,
        first_episode=episodes.start,
    )


def _with_target_likelihood(sampler: TreeSampler) -> TreeSampler:
    """Return a sampler that takes probes' likelihood from the target's own pass, if possible."""
    if not _scores_contexts(sampler.target.language_model):
        return sampler
    scoring = sampler.with_attacker(sampler.attacker)
    scoring.reward = sampler.reward.model_copy(update={"likelihood_model": "target"})
    return scoring


def _scores_contexts(model: Any) -> bool:
    """Return whether a model scores the text it reads; chat models and adapter engines do not."""
    return isinstance(model, TokenScorer) and model.can_score_contexts


def _target_likelihoods(tree: RolloutTree, sampler: TreeSampler) -> dict[str, list[Any]]:
    """Return columns of probes' log-probabilities under the target, and derived values."""
    target, reward, nodes = sampler.target, sampler.reward, tree.nodes
    if isinstance(target, ChatAgent) or not _scores_contexts(target.language_model):
        return {}
    if sampler.reader.shares_tokens_with(target):
        probes = Generation(nodes["probe"], nodes["probe_mask"], nodes["probe_logprobs"])
        lengths = [len(ids) for ids in sampler.reader.content_ids(probes)]
    else:
        lengths = [len(target.conversation_format.encode(probe)) for probe in tree.probes]
    nll = nodes["probe_nll"].tolist()
    columns: dict[str, list[Any]] = {
        "target_logprob": [-n * k for n, k in zip(nll, lengths, strict=True)],
        "target_num_tokens": lengths,
    }
    if reward.likelihood_model == "target":
        return columns
    # The tree was played with the target's likelihood; these are of the scenario's own reward.
    nll_N = mean_nll(nodes["reference_logprobs"], nodes["probe_mask"])
    rewards_N = ast_reward(
        nodes["response_score"],
        nodes["combined_score"],
        nll_N,
        nodes["is_empty"],
        w_response=reward.w_response,
        w_combined=reward.w_combined,
        w_likelihood=reward.w_likelihood,
        empty_nll=math.log(len(sampler.reference.language_model.tokenizer)),
    ).masked_fill(nodes["reward"].isnan(), math.nan)
    return columns | {"reward": rewards_N.tolist(), "probe_nll": nll_N.tolist()}


# ---- proposals: the turns of reference and attacker in one conversation


class _TurnsInOrder(GenerationSession):
    """A session in which several sessions sample one turn each, in order."""

    def __init__(self, sessions: Sequence[GenerationSession], turns: Sequence[int]) -> None:
        self._sessions = sessions
        self._turns = iter(sessions[turn] for turn in turns)
        self._used: list[GenerationSession] = []

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_RT: Tensor,
        options: SamplingOptions,
        *,
        branching: int = 1,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Turns:
        self._used.append(next(self._turns))
        return self._used[-1].generate(
            contexts, rows_per_context, uniforms_RT, options, branching=branching, spans=spans
        )

    def settle(self, generations: Sequence[Generation]) -> list[Generation]:
        settled = list(generations)
        for session in self._sessions:
            own = [place for place, one in enumerate(self._used) if one is session]
            found = session.settle([generations[place] for place in own]) if own else []
            for place, one in zip(own, found, strict=True):
                settled[place] = one
        return settled

    def close(self) -> None:
        for session in self._sessions:
            session.close()


def _open_session(models: Sequence[TokenSampler], turns: Sequence[int]) -> GenerationSession:
    return _TurnsInOrder([model.open_session() for model in models], turns)


def why_inexact(agents: Sequence[ConversationAgent | TextAttacker]) -> str | None:
    """Return why the probability of a sampled probe is not exact; None if it is."""
    with_tokens = [agent for agent in agents if isinstance(agent, ConversationAgent)]
    if len(with_tokens) < len(agents):
        return "the attacker gives texts without probabilities"
    if not all(isinstance(agent.language_model, TokenScorer) for agent in with_tokens):
        return "the backend of the attacker samples tokens without scoring them"
    first, *others = (agent.sampling for agent in with_tokens)
    if any(other != first for other in others):
        return "attacker and reference are sampled with different options"
    faults = []
    if first.temperature != 1.0:
        faults.append(f"temperature {first.temperature:g}")
    if first.top_k is not None:
        faults.append(f"top_k {first.top_k}")
    if first.top_p < 1.0:
        faults.append(f"top_p {first.top_p:g}")
    if faults:
        return (
            f"the attacker is sampled with {', '.join(faults)}, so that the probability of a probe "
            "is not the model's own; weights are exact at temperature 1 without top_k and top_p"
        )
    return None


def sampled_logprobs(model: TokenScorer, tree: RolloutTree, options: SamplingOptions) -> Tensor:
    """Return each probe's log-probability under the sampling distribution, `[N]`, nats.

    NaN if the backend cannot compute it.
    """
    nodes = tree.nodes
    contexts = [tree.context_of(node) for node in range(tree.num_nodes)]
    rows = *pad_left(contexts, torch.device("cpu")), nodes["probe"], nodes["probe_mask"]
    logprobs_NT = model.sampled_logprobs(*rows, options)
    if logprobs_NT is None:
        return torch.full((tree.num_nodes,), float("nan"))
    return logprobs_NT.double().sum(dim=1)


def sampler_of(proposal: str, sampler: TreeSampler, *, num_turns: int) -> TreeSampler:
    """Return a sampler whose attacker has the turns of attacker and reference in a proposal.

    Its conversations have `num_turns` turns, do not branch, and are all held in memory.
    """
    reference = sampler.reference
    # An attacker without known probabilities is in no mixture.
    attacker = sampler.attacker if isinstance(sampler.attacker, ConversationAgent) else reference
    models = [as_sampler(agent.language_model, role=agent.role) for agent in (reference, attacker)]
    # All but the sessions is the reference's, which differs from the attacker in weights alone.
    model: Any = copy.copy(reference.language_model)
    model.submodels = models
    model.open_session = partial(_open_session, models, attacker_turns(proposal, num_turns))
    mixed = sampler.with_attacker(replace(reference, language_model=model))
    mixed.max_cache_bytes = None
    return mixed


# ---- ratings


def num_ratings(
    episodes: Sequence[Episode], ordinary: Sequence[Episode], scorers: Mapping[str, Scorer]
) -> int:
    """Return the number of texts rated by `rate_anew`."""
    first = next(iter(scorers.values()))
    by_first = 2 if first.reads_history else 3
    num_turns, num_ordinary = (sum(map(len, some)) for some in (episodes, ordinary))
    return num_turns * (by_first + len(scorers) - 1) + num_ordinary * by_first


def rate_anew(
    episodes: Sequence[Episode], ordinary: Sequence[Episode], scorers: Mapping[str, Scorer]
) -> int:
    """Replace all ratings in rows, and return the number of rated texts.

    Parameters
    ----------
    ordinary : Sequence[Episode]
        Those for the probability of failure, which the first scorer alone rates.
    scorers : Mapping[str, Scorer]
        By name, the deciding one first.
    """
    for row in (row for episode in [*episodes, *ordinary] for row in episode):
        # The reward depends on the ratings.
        for column in ("outcome", "reward", "scores"):
            row.pop(column, None)
    (_, first), *others = scorers.items()
    rate_responses(episodes, first)
    rate_by_others(episodes, dict(others))
    if ordinary:
        rate_responses(ordinary, first)
    return num_ratings(episodes, ordinary, scorers)


def rate_responses(episodes: Sequence[Episode], scorer: Scorer) -> None:
    """Write response, combined and probe scores to rows as in a rollout.

    A scorer that reads the history has seen the probe when it rates the response, so its combined
    score is that of the response.
    """
    turns = list(_turns(episodes))
    responses = _rate_turns(scorer, turns, _response)
    combined = responses
    if not scorer.reads_history:
        combined = _rate_turns(scorer, turns, _probe_and_response)
    for (row, _), response, both in zip(turns, responses, combined, strict=True):
        row["response_score"], row["combined_score"] = response.score, both.score
        row["is_error"] = response.is_error or both.is_error
    rate_probes(episodes, scorer)


def rate_probes(episodes: Sequence[Episode], scorer: Scorer) -> None:
    """Write the scores of the probes themselves to rows."""
    turns = list(_turns(episodes))
    probes = [Exchange(row["probe"], b, "user", columns_of_record(row)) for row, b in turns]
    for (row, _), score in zip(turns, scorer.rate(probes).scores_N.tolist(), strict=True):
        row["probe_score"] = _known(score)


def rate_by_others(episodes: Sequence[Episode], scorers: Mapping[str, Scorer]) -> None:
    """Write each further scorer's rating of the response to `scores`."""
    turns = list(_turns(episodes))
    for name, scorer in scorers.items():
        ratings = _rate_turns(scorer, turns, _response)
        for (row, _), rating in zip(turns, ratings, strict=True):
            row.setdefault("scores", {})[name] = rating._asdict()


class _Rating(NamedTuple):
    """A turn's score, or None with the reason."""

    score: float | None
    is_error: bool


def _rate_turns(
    scorer: Scorer,
    turns: Sequence[tuple[Row, tuple[Turn, ...]]],
    make_exchange: Callable[[Row, tuple[Turn, ...]], Exchange],
) -> list[_Rating]:
    """Rate turns; one without a response has no verdict."""
    failures = [row.get("response_failure") for row, _ in turns]
    ratings = [_Rating(None, is_error(failure)) for failure in failures]
    answered = [place for place, failure in enumerate(failures) if failure is None]
    rated = scorer.rate([make_exchange(*turns[place]) for place in answered])
    values = zip(rated.scores_N.tolist(), rated.is_error_N.tolist(), strict=True)
    for place, (score, has_failed) in zip(answered, values, strict=True):
        ratings[place] = _Rating(_known(score), has_failed)
    return ratings


def scored_by(name: str, episode: Episode) -> Episode:
    """Return the rows of an episode with the scores of a further scorer."""
    own = (row["scores"][name] for row in episode)
    return [
        row | {"response_score": one["score"], "is_error": one["is_error"]}
        for row, one in zip(episode, own, strict=True)
    ]


def _response(row: Row, before: tuple[Turn, ...]) -> Exchange:
    history = (*before, Turn("user", row["probe"]))
    return Exchange(
        row["response"],
        history,
        columns=columns_of_record(row),
        reasoning=row.get("response_reasoning"),
        calls=calls_of_plain(row.get("response_calls")),
    )


def _probe_and_response(row: Row, _: tuple[Turn, ...]) -> Exchange:
    return Exchange(f"{row['probe']} {row['response']}", reasoning=row.get("response_reasoning"))


def _turns(episodes: Sequence[Episode]) -> Iterator[tuple[Row, tuple[Turn, ...]]]:
    """Yield each row with the messages before its probe."""
    for episode in episodes:
        before: tuple[Turn, ...] = (Turn("assistant", str(episode[0]["prompt"])),)
        for row in episode:
            yield row, before
            calls = calls_of_plain(row.get("response_calls"))
            response = Turn("assistant", str(row["response"]), calls=calls)
            before = (*before, Turn("user", str(row["probe"])), response)


def _known(score: float) -> float | None:
    return None if math.isnan(score) else score


# ---- conversations of other evaluations

SPEAKERS = ("attacker", "target", "prompts", "reward")
"""Parts of a configuration that determine conversations or their columns."""
KEYS = ("split", "seed", "num_turns")
"""Options that determine all conversations."""
PROBABILITY_KEYS = ("num_probability_episodes", "use_importance_sampling")
"""Further options that determine the conversations for the probability of failure."""


def reuse_conversations(
    folder: EvaluationFolder,
    configuration: Mapping[str, Any],
    scorers: Mapping[str, Scorer],
    options: EvaluationOptions,
) -> str | None:
    """Copy another evaluation's conversations into an empty one, and return its name.

    Ratings by scorers with the same name, parameters and code are kept, except in conversations
    with a scorer error. An evaluation that cannot be read is skipped with a warning.

    Parameters
    ----------
    folder : EvaluationFolder
        Open, with this configuration.
    scorers : Mapping[str, Scorer]
        By name, the deciding one first.
    """
    length = options.num_turns
    own, own_probability = folder.rows(length), folder.probability_rows(length)
    if own.recover() or own_probability.recover():
        return None
    found = _stored_conversations(folder, configuration, length)
    longest = max(found, key=lambda one: len(one[1]), default=(folder, [], []))
    other, episodes, ordinary = longest
    if not episodes:
        return None
    episodes = episodes[: options.num_episodes]
    before = other.configuration().get("scorers", {})
    calls = _rate_reused(episodes, ordinary, scorers, configuration["scorers"], before)
    for file, chains in ((own, episodes), (own_probability, ordinary)):
        if chains:
            file.append([row for chain in chains for row in chain])
    folder.note_part(
        {
            "table": "reused",
            "reused_from": other.path.name,
            "num_episodes": len(episodes) + len(ordinary),
            "reused_queries": sum(map(len, [*episodes, *ordinary])),
            "scorer_calls": calls,
        }
    )
    return other.path.name


def _stored_conversations(
    folder: EvaluationFolder, configuration: Mapping[str, Any], length: int
) -> Iterator[tuple[EvaluationFolder, list[Episode], list[Episode]]]:
    """Yield other evaluations with their matching conversations, the last by name first."""
    for path in sorted(folder.path.parent.glob(f"*/{CONFIGURATION}"), reverse=True):
        other = EvaluationFolder(path.parent)
        if other.path == folder.path:
            continue
        try:
            stored = other.configuration()
            episodes, ordinary = (
                _matching(file, stored, configuration, keys)
                for file, keys in (
                    (other.rows(length), KEYS),
                    (other.probability_rows(length), (*KEYS, *PROBABILITY_KEYS)),
                )
            )
        except NipAstraError as error:
            name = path.parent.name
            logger.warning("conversations of the evaluation %s are not reused: %s", name, error)
            continue
        yield other, episodes, ordinary


def _matching(
    file: RowFile, stored: Mapping[str, Any], wanted: Mapping[str, Any], keys: Sequence[str]
) -> list[Episode]:
    """Return the whole conversations of a file, if speakers and the options `keys` are equal."""
    # Of rated conversations the speakers are unknown.
    if "options" not in stored or "scored_from" in stored:
        return []
    if any(stored.get(name) != wanted.get(name) for name in SPEAKERS):
        return []
    if any(stored["options"].get(name) != wanted["options"].get(name) for name in keys):
        return []
    rows = file.read()
    return episodes_of(rows[: len(rows) // file.episode_length * file.episode_length])


def _rate_reused(
    episodes: list[Episode],
    ordinary: list[Episode],
    scorers: Mapping[str, Scorer],
    wanted: Mapping[str, Any],
    stored: Mapping[str, Any],
) -> int:
    """Rate by scorers whose ratings are missing, and return the number of texts."""
    (first, *others), (first_before, *others_before) = scorers, stored
    is_same = {name for name in wanted if stored.get(name) == wanted[name]}
    if first != first_before or first not in is_same:
        return rate_anew(episodes, ordinary, scorers)
    known = is_same & set(others) & set(others_before)
    for row in (row for episode in episodes for row in episode):
        ratings = row.pop("scores", {})
        if known:
            row["scores"] = {name: ratings[name] for name in known}
    rated = [episode for episode in episodes if not _has_error(episode)]
    failed = [episode for episode in episodes if _has_error(episode)]
    failed_ordinary = [episode for episode in ordinary if _has_error(episode)]
    missing = {one: scorers[one] for one in others if one not in known}
    rate_by_others(rated, missing)
    calls = sum(map(len, rated)) * len(missing)
    if failed or failed_ordinary:
        calls += rate_anew(failed, failed_ordinary, scorers)
    return calls


def _has_error(episode: Episode) -> bool:
    ratings = (one for row in episode for one in (row, *row.get("scores", {}).values()))
    return any(rating.get("is_error") for rating in ratings)
