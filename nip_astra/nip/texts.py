"""nip's trainers of chat models: the base class, its environment and its groups, over ours.

Rollouts have nip's layout, a row a round with the batch size [N, R]:

    datapoint_id, seed, y, round, stance, (datapoint, <column>)    of the rollout, in each round
    padding, done, (agents, done)                                  before the round
    (next, done), (next, terminated), (next, agents, reward)       after it
    message_history, message_agent_id [R, C], raw_message_history [R, A]   of the rounds before
    (agents, retry_count), (agents, token_limit) [A, C]

and our entries beside them (`nip_astra.samplers.text_rollouts`), with `round_decision`, the
decision that counted.

Shape suffixes: `N` rollout, `R` round, `A` agent, `C` channel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.chat import CHAT_MODELS
from nip_astra.language_models.services.fine_tuning import FineTuningJob, PreferenceExample
from nip_astra.nip.components import unviewed
from nip_astra.nip.hyper_params import HyperParameters
from nip_astra.nip.running import checkpoint_base_dir, converted, resolved_of
from nip_astra.nip.tensors import (
    ReinforceTrainer,
    SoloAgentTrainer,
    SpgTrainer,
    VanillaPpoTrainer,
)
from nip_astra.nip.views import ProtocolView, Settings, View
from nip_astra.parameters.trainers import guess_replacement_proportion
from nip_astra.protocols.protocol_base import CONTINUE
from nip_astra.resolving.analysing import analyse_run, count_analysis
from nip_astra.samplers.text_rollouts import (
    AnswerJournal,
    TextMove,
    TextNode,
    TextRolloutSampler,
    read_prompt,
    rollouts_of,
    warn_of_silence,
)
from nip_astra.scenario_base.text.game import TextEpisode
from nip_astra.scenario_base.text.models import PureTextSharedModelGroup as OurGroup
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import plain_numbers
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer as OurTrainer
from nip_astra.trainers.rl_pure_text_base import Split
from nip_astra.trainers.text.expert_iteration import PureTextEiTrainer as OurEiTrainer
from nip_astra.trainers.text.malt import PureTextMaltTrainer as OurMaltTrainer
from nip_astra.trainers.trainer_base import Trainer
from nip_astra.utils.nested_array_dict import (
    NestedArrayDict,
    concatenate_nested_array_dicts,
    stack_nested_array_dicts,
)

logger = logging.getLogger(__name__)

OUR_ANALYSERS = {
    "prover_direct_quotation": "direct_quotation",
    "prover_accurate_quotation": "accurate_quotation",
}
"""Analysers with another name here."""
ROLLOUT_ANALYSERS = {
    ("code_validation", name): OUR_ANALYSERS.get(name, name)
    for name in (*OUR_ANALYSERS, "prover_role_conformance", "follow_up")
}
"""Analysers by scenario and nip's name."""

OF_ROLLOUT = ("datapoint_id", "seed", "y", "stance", "datapoint")
"""Our entries of a whole rollout, which nip has in each round."""
NIP_ONLY = (
    *("round", "done", "next", "message_history", "message_agent_id", "raw_message_history"),
    *(("agents", "done"), ("agents", "retry_count"), ("agents", "token_limit")),
)
"""Entries that are derived from others."""


def as_nip(rollouts: NestedArrayDict) -> NestedArrayDict:
    """Convert our rollouts [N] to nip's layout [N, R]."""
    size = rollouts["padding"].shape
    found = NestedArrayDict(batch_size=size)
    for key, array in rollouts.items(True, True):
        name = key if isinstance(key, str) else key[0]
        if name not in ("num_rounds", "decision"):
            is_whole = name in OF_ROLLOUT
            found[key] = np.repeat(array[:, None], size[1], axis=1) if is_whole else array
    is_last_NR = np.arange(size[1]) == (rollouts["num_rounds"] - 1)[:, None]
    found["round_decision"] = np.where(is_last_NR, rollouts["decision"][:, None], CONTINUE)
    return _completed(found)


def as_ours(rollouts: NestedArrayDict) -> NestedArrayDict:
    """Convert rollouts in nip's layout [N, R] to ours [N]; a trainer's own entries stay [N, R]."""
    found = NestedArrayDict(batch_size=rollouts.batch_size[0])
    for key, array in rollouts.items(True, True):
        name = key if isinstance(key, str) else key[0]
        if key in NIP_ONLY or name in NIP_ONLY or key == "round_decision":
            continue
        found[key] = array[:, 0] if name in OF_ROLLOUT else array
    found["num_rounds"] = (~rollouts["padding"]).sum(axis=1)
    found["decision"] = rollouts["round_decision"].min(axis=1)
    return found


def _completed(rows: NestedArrayDict) -> NestedArrayDict:
    """Add nip's entries to ours of whole rollouts [N, R]."""
    padding_NR, decided_NR = rows["padding"], rows["round_decision"] != CONTINUE
    num_rounds = padding_NR.shape[1]
    counts_N = (~padding_NR).sum(axis=1)
    is_last_NR = np.arange(num_rounds) == (counts_N - 1)[:, None]
    active_NRA, message_NRAC = rows["agents", "is_active"], rows["agents", "message"]
    num_channels = message_NRAC.shape[-1]
    rows["round"] = np.minimum(np.arange(num_rounds), counts_N[:, None])
    rows["done"] = padding_NR
    rows["next", "done"] = padding_NR | decided_NR
    rows["next", "terminated"] = is_last_NR & ~decided_NR
    rows["next", "agents", "reward"] = rows["agents", "reward"]
    rows["agents", "done"] = np.repeat(padding_NR[..., None], active_NRA.shape[-1], axis=-1)
    text_NRC, sender_NRC = _by_channel(message_NRAC)
    raw_NRA = rows["agents", "raw_message"].astype(object)
    raw_NRA[~active_NRA] = None
    for key, array in (
        ("message_history", text_NRC),
        ("message_agent_id", sender_NRC),
        ("raw_message_history", raw_NRA),
    ):
        rows[key] = np.stack([_before(array, number) for number in range(num_rounds)], axis=1)
    for name, ours in (("retry_count", "num_retries"), ("token_limit", "is_cut")):
        rows["agents", name] = np.repeat(rows["agents", ours][..., None], num_channels, axis=-1)
    return rows


def _by_channel(message_NRAC: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return messages by channel, None for none, and their senders, -1 for none."""
    shape = (*message_NRAC.shape[:2], message_NRAC.shape[-1])
    messages, sender = np.full(shape, None, dtype=object), np.full(shape, -1)
    for n, r, a, c in np.ndindex(message_NRAC.shape):
        if message_NRAC[n, r, a, c] is not None:
            messages[n, r, c], sender[n, r, c] = message_NRAC[n, r, a, c], a
    return messages, sender


def _before(array_NR: npt.NDArray[Any], number: int) -> npt.NDArray[Any]:
    """Return the entries before a round, with missing values after it."""
    nothing = None if array_NR.dtype == object else -1
    kept = array_NR.copy()
    kept[:, number:] = nothing
    return kept


class PureTextEnvironment:
    """One split of the data, sampled round by round: a state is a row with batch size [1].

    Attributes
    ----------
    train : bool
        Whether it is the training split.
    dataset : NestedArrayDict
        The datapoints.
    num_envs : int
        Rollouts of an iteration.
    """

    batch_size = (1,)
    dataset: NestedArrayDict

    def __init__(self, trainer: OurTrainer, split: Split) -> None:
        instance = trainer.instance
        self.train, self.game, self.loop = split == "train", trainer.game, instance.loop
        self.protocol_handler = ProtocolView(self.game.protocol)
        self.dataset = instance.train_data if self.train else instance.test_data
        self.num_envs = trainer.text_rl.rollouts_per_iteration
        self.split = split
        self.begin([], (), AnswerJournal())

    def begin(
        self, episodes: Sequence[TextEpisode], key: tuple[str | int, ...], journal: AnswerJournal
    ) -> None:
        """Start a sampling with its episodes, the key of its requests, and recorded answers."""
        self.episodes, self.key, self.journal = list(episodes), key, journal
        self.nodes: dict[str, TextNode] = {}
        self._num_branches: dict[str, int] = {}

    def data_batches(self) -> Iterator[NestedArrayDict]:
        """Yield the datapoints of the sampling, one per rollout."""
        for place, episode in enumerate(self.episodes):
            yield NestedArrayDict(
                {
                    "place": [place],
                    "datapoint_id": [episode.datapoint_id],
                    "y": [episode.datapoint["y"]],
                },
                1,
            )

    def reset(self, data_batch: NestedArrayDict | None = None) -> NestedArrayDict:
        """Return the state before the first round; of the first datapoint by default."""
        place = 0 if data_batch is None else int(data_batch["place"][0])
        node = TextNode(str(place), self.episodes[place])
        self.nodes[node.node_id] = node
        return self._before(node)

    def node_before(self, env_state: NestedArrayDict) -> TextNode:
        """Return the round that led to a state."""
        return self.nodes[env_state["node", "parent"][0]]

    def branch_of(self, node: TextNode) -> str:
        """Return a name for a further branch of an episode."""
        number = self._num_branches.get(node.node_id, 0)
        self._num_branches[node.node_id] = number + 1
        return f"{node.node_id}.{number}"

    def act(self, env_state: NestedArrayDict, name: str, moves: Mapping[str, TextMove]) -> None:
        """Write the agents' moves in a round into the state before it."""
        child = self._played(self.node_before(env_state), name, moves)
        for key, value in self._row(child).items(True, True):
            if key[0] != "next":
                env_state[key] = value

    def step(self, env_state: NestedArrayDict) -> NestedArrayDict:
        """Write the result of a round under `next`, from the agents' `raw_message`."""
        before, child = self.node_before(env_state), self.nodes[env_state["node", "id"][0]]
        turns = {turn.agent: turn for turn in self.game.turns(before.episode)}
        moves = dict(child.moves)
        for number, agent in enumerate(self.game.protocol.agent_names):
            text = env_state["agents", "raw_message"][0, number]
            if agent in moves and text != moves[agent].answer:
                parsed = self.game.read(turns[agent], text)
                moves[agent] = moves[agent]._replace(answer=text, parsed=parsed, is_filled=False)
        if moves != child.moves:
            child = self._played(before, child.node_id, moves)
        for key, value in self._row(child).items(True, True):
            env_state[key] = value
        return env_state

    def get_next_state_from_state(self, env_state: NestedArrayDict) -> NestedArrayDict:
        """Return the state before the next round."""
        return self._before(self.nodes[env_state["node", "id"][0]])

    def add_dummy_actions_and_next_to_state(self, env_state: NestedArrayDict) -> NestedArrayDict:
        """Fill in the row of a round after the episode's end."""
        node = self.node_before(env_state)
        rows = as_nip(rollouts_of(self.game, [node]))
        for key, value in rows[:, self.game.protocol.max_message_rounds - 1].items(True, True):
            if key != "padding":
                env_state[key] = value
        return env_state

    def _played(self, node: TextNode, name: str, moves: Mapping[str, TextMove]) -> TextNode:
        answers = {agent: (move.answer, move.parsed) for agent, move in moves.items()}
        outcome = self.game.play(node.episode, answers)
        self.nodes[name] = TextNode(name, outcome.episode, node, moves, outcome)
        return self.nodes[name]

    def _row(self, node: TextNode) -> NestedArrayDict:
        """Return the row of a node's round."""
        assert node.outcome is not None
        row: NestedArrayDict = as_nip(rollouts_of(self.game, [node]))[:, node.episode.round - 1]
        row["next", "terminated"] = [node.outcome.is_out_of_rounds]
        return row

    def _before(self, node: TextNode) -> NestedArrayDict:
        """Return the row before the round after a node."""
        number = min(node.episode.round, self.game.protocol.max_message_rounds - 1)
        row: NestedArrayDict = as_nip(rollouts_of(self.game, [node]))[:, number]
        state = NestedArrayDict(
            {key: value for key, value in row.items() if key != "next"}, row.batch_size
        )
        state["node", "parent"], state["padding"] = [node.node_id], [False]
        return state


class PureTextCombinedWhole:
    """All agents as one module."""

    def __init__(self, sampler: TextRolloutSampler) -> None:
        self.sampler = sampler

    def forward(
        self, env_state: NestedArrayDict, environment: PureTextEnvironment
    ) -> NestedArrayDict:
        """Query the active agents, and write their moves into the state."""
        node = environment.node_before(env_state)
        name = environment.branch_of(node)
        text_node = TextNode(name, node.episode)
        by_agent = environment.loop.run(
            self.sampler.moves(text_node, 1, environment.key, environment.journal)
        )
        moves = {agent: found[0] for agent, found in by_agent.items()}
        warn_of_silence(moves.items(), node.episode.round + 1)
        environment.act(env_state, name, moves)
        return env_state

    __call__ = forward


class PureTextSharedModelGroup(View):
    """Our group of agents that share a model, with nip's names in addition.

    Attributes
    ----------
    group_name : str
        Of the group.
    agent_names : list of str
        Its members.
    get_fine_tune_job_status, switch_to_next_model, get_state, set_state
        Those of our group.
    """

    group_name: str
    agent_names: list[str]
    model_name: str
    get_fine_tune_job_status: Callable[[], Any]
    switch_to_next_model: Callable[[], None]
    get_state: Callable[[], dict[str, Any]]
    set_state: Callable[[Mapping[str, Any]], None]

    def __init__(self, group: OurGroup) -> None:
        names = [agent.name for agent in group.agents]
        super().__init__(group, group_name=group.name, agent_names=names)

    def agent_ids_and_names(self) -> list[tuple[int, str]]:
        """Return members by index in the protocol, and their names."""
        return [(agent.number, agent.name) for agent in self._viewed.agents]

    def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: Mapping[str, NestedArrayDict],
        guess_replaced_rollouts: Mapping[str, NestedArrayDict] = {},
        job_name: str | None = None,
    ) -> FineTuningJob | None:
        """Train the model on rollouts; see our group's. The job's name is logged."""
        ours = [
            {name: as_ours(rollouts) for name, rollouts in given.items()}
            for given in (rollouts_per_agent, guess_replaced_rollouts)
        ]
        return self._logged(self._viewed.create_supervised_fine_tune_job(*ours), job_name)

    def create_dpo_fine_tune_job(
        self,
        timesteps_per_agent: Mapping[str, NestedArrayDict],
        positive_examples_per_agent: Mapping[str, NestedArrayDict],
        negative_examples_per_agent: Mapping[str, NestedArrayDict],
        job_name: str | None = None,
    ) -> FineTuningJob | None:
        """Train the model to prefer the answers of some rounds to those of others.

        Parameters
        ----------
        timesteps_per_agent : Mapping of NestedArrayDict
            The previous rounds, by agent; prompts are read from the answers.
        positive_examples_per_agent, negative_examples_per_agent : Mapping of NestedArrayDict
            Rounds with the preferred and the rejected answers, by agent, of equal number.
        """
        pairs: list[PreferenceExample] = []
        for number, name in self.agent_ids_and_names():
            better, worse = positive_examples_per_agent[name], negative_examples_per_agent[name]
            for place in range(len(timesteps_per_agent[name])):
                pairs += _pair(better[place], worse[place], number)
        return self._logged(self._viewed.create_dpo_fine_tune_job(pairs), job_name)

    def _logged(self, job: FineTuningJob | None, name: str | None) -> FineTuningJob | None:
        if job is not None and name is not None:
            logger.info("the job %s is %s", name, job.job_id)
        return job


def _pair(better: NestedArrayDict, worse: NestedArrayDict, agent: int) -> list[PreferenceExample]:
    """Return the pair of an agent's answers in two rounds; empty if they are equal or missing."""
    texts = [
        row["agents", "raw_message"][agent]
        for row in (better, worse)
        if row["agents", "is_active"][agent] and not row["agents", "is_filled"][agent]
    ]
    if len(texts) < 2 or texts[0] == texts[1]:
        return []
    prompt = read_prompt(better["agents", "prompt"][agent])
    return [PreferenceExample(prompt, texts[0], texts[1])]


class PureTextRlTrainer(OurTrainer):
    """Our base of trainers of chat models, with nip's hooks: rollouts have nip's layout.

    Hooks: `_stage_create_fine_tune_jobs(rollouts)`, `_get_log_stats(rollouts, *, train)`,
    `_sample_rollouts(environment, iteration, use_tqdm, tqdm_desc)` and
    `_sample_rollouts_for_single_environment(args)`. Unless the last one is overridden, all
    conversations are sampled together; an override samples them one by one.
    """

    sections_of_others: ClassVar[tuple[str, ...]] = ("pure_text_ei", "pure_text_malt")
    state: Any
    train_environment: PureTextEnvironment
    test_environment: PureTextEnvironment
    combined_agent: PureTextCombinedWhole
    shared_model_groups: Any

    def __init__(self, hyper_params: Any, scenario_instance: Any, settings: Any = None) -> None:
        view = converted(hyper_params, kind=scenario_instance.kind, is_text=True)
        super().__init__(view, scenario_instance, Settings.of(settings, lambda: self.tracker))
        groups = self.shared_model_groups.items()
        self.shared_model_groups = {
            name: PureTextSharedModelGroup(group)  # type: ignore[misc]  # it offers all of ours
            for name, group in groups
        }
        self.protocol_handler = ProtocolView(self.game.protocol)
        self.max_message_rounds = self.game.protocol.max_message_rounds
        self.num_agents = self.game.protocol.num_agents
        self.train_environment = PureTextEnvironment(self, "train")
        self.test_environment = PureTextEnvironment(self, "test")
        self.combined_agent = PureTextCombinedWhole(self.sampler)
        self.scenario_instance: Any = View(
            scenario_instance,
            train_dataset=self.instance.train_data,
            test_dataset=self.instance.test_data,
            train_environment=self.train_environment,
            test_environment=self.test_environment,
            combined_whole=self.combined_agent,
            shared_model_groups=self.shared_model_groups,
        )

    def _sample_rollouts(  # type: ignore[override]  # nip's signature
        self,
        environment: PureTextEnvironment,
        iteration: int | Literal["test"],
        use_tqdm: bool = False,
        tqdm_desc: str = "Sampling rollouts",
    ) -> NestedArrayDict:
        """Sample the rollouts of an iteration, or of a test."""
        number = self.state.iteration if iteration == "test" else iteration
        single = type(self)._sample_rollouts_for_single_environment
        if single is PureTextRlTrainer._sample_rollouts_for_single_environment:
            return as_nip(self._play(environment.split, number))
        journal = self.files.journal(environment.split, number, self.state.run_key)
        key = (self.hyper_params.seed, environment.split, number)
        environment.begin(self.episodes(environment.split, number), key, journal)
        batches = list(environment.data_batches())
        found: list[NestedArrayDict] = []
        for batch in tqdm(batches, desc=tqdm_desc, disable=not use_tqdm):
            args = (self.hyper_params, self.protocol_handler, environment, self.combined_agent)
            found += single((*args, batch))
            self._raise_if_stopped()
        self._count_requests(journal)
        return stack_nested_array_dicts(found)

    @staticmethod
    def _sample_rollouts_for_single_environment(args: tuple[Any, ...]) -> list[NestedArrayDict]:
        """Sample one datapoint, round by round.

        Parameters
        ----------
        args : tuple
            Hyper-parameters, protocol, environment, agents and the datapoint.

        Returns
        -------
        list of NestedArrayDict
            Rollouts [R].
        """
        _, protocol, environment, agents, batch = args
        state = environment.reset(batch)
        rows: list[NestedArrayDict] = []
        for _ in range(protocol.max_message_rounds):
            if "next" not in state.keys():  # noqa: SIM118  # names alone, not a lookup
                is_over = bool(rows) and bool(
                    rows[-1]["next", "done"][0] or rows[-1]["next", "terminated"][0]
                )
                if is_over:
                    state["padding"] = [True]
                    state = environment.add_dummy_actions_and_next_to_state(state)
                else:
                    state = environment.step(agents.forward(state, environment))
            rows.append(state)
            if not state["padding"][0]:
                state = environment.get_next_state_from_state(state)
        return [concatenate_nested_array_dicts(rows)]

    def _get_log_stats(self, rollouts: NestedArrayDict, *, train: bool = True) -> dict[str, Any]:
        """Return metrics of rollouts in nip's layout, possibly with tables; see our base."""
        return super()._get_log_stats(as_ours(rollouts), train=train)

    def _get_verifier_guess_replacement_proportion(self, iteration: int) -> float:
        """Return the share of rollouts with the correct decision as the verifier's target."""
        return guess_replacement_proportion(self.text_rl, iteration)

    def _get_fine_tune_job_name(self, shared_model_group: PureTextSharedModelGroup) -> str:
        """Return a name for a group's job: run, iteration and group."""
        run = self.settings.run_id or "NO_RUN_ID"
        return f"{run}_iter_{self.state.iteration}_{shared_model_group.group_name}"

    # ---- calls of the hooks by our base class

    def _sampled(self, split: Split, iteration: int) -> NestedArrayDict:
        is_train = split == "train"
        environment = self.train_environment if is_train else self.test_environment
        return as_ours(
            self._sample_rollouts(
                environment, iteration if is_train else "test", use_tqdm=self.settings.progress
            )
        )

    def _statistics_of(self, rollouts: NestedArrayDict, *, train: bool) -> dict[str, Any]:
        figures = self._get_log_stats(as_nip(rollouts), train=train)
        tables = {name: one for name, one in figures.items() if hasattr(one, "columns")}
        for name, table in tables.items():
            rows = [tuple(row) for row in table.to_numpy().tolist()]
            columns = [str(column) for column in table.columns]
            self.tracker.log_table(name, columns, rows, step=self.state.iteration + 1)
        return plain_numbers({name: one for name, one in figures.items() if name not in tables})

    def _rollouts_to_learn_from(self, iteration: int) -> NestedArrayDict:
        section = self.hyper_params.pure_text_ei  # type: ignore[attr-defined]  # see sections_of_others
        first = 0 if section.fine_tune_on_all_previous_rollouts else iteration
        parts = [self._rollouts_of(number) for number in range(first, iteration + 1)]
        return as_nip(concatenate_nested_array_dicts(parts))


class _Analysed(OurTrainer):
    """nip's objects, and its methods on a finished run, for our trainers of chat models."""

    def __init__(self, hyper_params: Any, scenario_instance: Any, settings: Any = None) -> None:
        if isinstance(hyper_params, HyperParameters):
            hyper_params = resolved_of(hyper_params).hyper_params
        super().__init__(hyper_params, unviewed(scenario_instance), settings)

    @staticmethod
    def get_checkpoint_base_dir_from_run_id(run_id: str) -> Path:
        """Return the folder of a run, with nip's file of hyper-parameters."""
        return checkpoint_base_dir(run_id)

    def run_analysers(
        self,
        analysers: Sequence[str],
        model_name: str,
        *,
        overwrite: bool = False,
        use_tqdm: bool = True,
        dry_run: bool = False,
    ) -> None:
        """Analyse the run's training rollouts with a judge; see `analyse_run`.

        Parameters
        ----------
        model_name : str
            The judge, a model of OpenAI.
        dry_run : bool
            Only count requests, and write nothing.
        """
        names = [OUR_ANALYSERS.get(name, name) for name in analysers]
        if self.run_directory is None:
            raise ConfigurationError(
                "the trainer has no run to analyse. Build it with the run_id of a run."
            )
        run = self.run_directory.path
        if dry_run:
            counts = count_analysis(
                run, names, CHAT_MODELS.get("scripted").Parameters(), split="train"
            )
            logger.warning("the analysers would ask %s", counts)
            return
        judge = CHAT_MODELS.get("openai").Parameters.from_dict(
            {"model": model_name, "api_key_variable": "OPENAI_API_KEY"}
        )
        analyse_run(run, names, judge, split="train", is_overwritten=overwrite)


class PureTextEiTrainer(_Analysed, OurEiTrainer):
    """Our trainer, with nip's names in addition."""


class PureTextMaltTrainer(_Analysed, OurMaltTrainer):
    """Our trainer, with nip's names in addition."""


OVER_OURS: dict[str, type[Trainer]] = {
    "vanilla_ppo": VanillaPpoTrainer,
    "reinforce": ReinforceTrainer,
    "spg": SpgTrainer,
    "solo_agent": SoloAgentTrainer,
    "pure_text_ei": PureTextEiTrainer,
    "pure_text_malt": PureTextMaltTrainer,
}
"""Our trainers with nip's names in addition."""


def get_trainer_class(hyper_params: Any) -> type[Trainer]:
    """Return the trainer class named by the hyper-parameters."""
    resolved = resolved_of(hyper_params)
    return OVER_OURS.get(resolved.hyper_params.trainer, resolved.trainer_class)


def build_trainer(
    hyper_params: Any, scenario_instance: ScenarioInstance, settings: ExperimentSettings
) -> Trainer:
    """Build the trainer named by the hyper-parameters, in the run's folder if it exists."""
    run = Path(settings.runs_dir) / str(settings.run_id)
    if settings.run_directory is None and settings.run_id is not None and run.is_dir():
        settings = settings.model_copy(update={"run_directory": RunDirectory.open(run)})
    return get_trainer_class(hyper_params)(hyper_params, scenario_instance, settings)
