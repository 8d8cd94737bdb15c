"""A problem built from Hugging Face models, sampled as trees of tokens.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nip_astra.astra.core.aliases import is_overridden, only_one
from nip_astra.astra.core.system import TokenValues, ValueFunctionSystem
from nip_astra.astra.core.texts import Conversation, Spoken, turns_of
from nip_astra.astra.ext.transformers.loading import ModelId, check_same_tokens, load_agents
from nip_astra.astra.ext.transformers.reading import Reader
from nip_astra.astra.methods.ast_system import WEIGHTS, ASTProblem
from nip_astra.astra.methods.text_rollouts import TextRollouts, rater_of_system
from nip_astra.errors import ConfigurationError
from nip_astra.language_models.base import (
    LanguageModel,
    as_language_model,
    pad_left,
    pad_right,
    require_finite,
)
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.trainers.ast.ppo import ValueHead
from nip_astra.utils.devices import resolve_device

MAX_CACHE_BYTES = 4 * 2**30
"""4 GiB."""
TEXT_METHODS = (
    *("rollout_prompt_with_attacker", "rollout_prompt_with_target", "advance"),
    *("get_attacker_logprobs", "get_target_logprobs", "get_baseline_logprobs"),
)
"""Methods through which trees are sampled if a subclass overrides one of them."""


class _Part:
    """The model or tokenizer of an agent, which cannot be replaced."""

    def __init__(self, role: str, name: str) -> None:
        self.role = role
        self.name = name

    def __get__(self, problem: HFASTProblem | None, owner: type | None = None) -> Any:
        if problem is None:
            return self
        return getattr(problem.agents[self.role].language_model, self.name, None)

    def __set__(self, problem: HFASTProblem, value: Any) -> None:
        raise ConfigurationError(
            f"the {self.name} of the {self.role} of {type(problem).__name__} cannot be replaced "
            f"by a {type(value).__name__}. Name the model in the constructor; for a trained one, "
            "HFEvaluationProblem(attacker_checkpoint=...)."
        )


class HFASTProblem(ASTProblem, ValueFunctionSystem[str, str]):
    """Attacker, target and reference from Hugging Face.

    Trees are sampled together and each token is forwarded once; the target and the reference are
    never trained. A model with a chat template reads conversations through it, another one line by
    line. Texts returned by the problem store their tokens (`Spoken`, `Conversation`), so their
    log-probabilities are those of the sampled tokens; a plain text is one turn, to be answered by
    the called role.

    Parameters
    ----------
    attacker_model_id, target_model_id : str or Path
        Hub id, folder, or GGUF file; the attacker's also as `tester_model_id` and
        `auditor_model_id`.
    baseline_model_id : str or Path, optional
        The reference; by default, or if it is the attacker's own model, the attacker before
        training.
    scorer : Scorer
        Rates texts; also `moderator`.
    device : str
        Device of the models: "cpu", "cuda", "cuda:1", "auto".
    attacker_options, target_options : Mapping
        Formats and sampling options; the parameters of a scenario's agent (`max_new_tokens`,
        `temperature`, `top_p`, `top_k`, `format`, `system_prompt`, `preamble`, ...).
        `language_model` may hold those of the backend (`lora`, `dtype`).
    **weights
        Of the reward; see `ASTProblem`.

    Attributes
    ----------
    attacker, target, baseline
        The models of transformers; `tester` and `auditor` are the attacker.
    tokenizer
        The attacker's; also `attacker_tokenizer`, `tester_tokenizer`, `auditor_tokenizer`.
    device : str
        Where models run.
    agents : dict[str, ConversationAgent]
        By role: attacker, target, reference.
    value_head : ValueHead or None
        Created when PPO needs it.
    max_cache_bytes : int
        Memory for the keys and values of a rollout. A larger rollout is split into parts; a single
        larger tree is refused.
    """

    max_batch_bytes = None  # the backend cuts its own passes
    max_cache_bytes = MAX_CACHE_BYTES

    def __init__(
        self,
        attacker_model_id: ModelId = None,
        target_model_id: ModelId = None,
        baseline_model_id: ModelId = None,
        scorer: Any = None,
        device: str | torch.device = "cpu",
        *,
        tester_model_id: ModelId = None,
        auditor_model_id: ModelId = None,
        moderator: Any = None,
        attacker_options: Mapping[str, Any] | None = None,
        target_options: Mapping[str, Any] | None = None,
        **weights: Any,
    ) -> None:
        weights = {"ppl_weight": WEIGHTS.w_likelihood, **weights}
        super().__init__(scorer, moderator=moderator, **weights)
        place = resolve_device(device)
        self.device = str(place)
        self.agents = load_agents(
            only_one(
                "the attacker's model",
                attacker_model_id=attacker_model_id,
                tester_model_id=tester_model_id,
                auditor_model_id=auditor_model_id,
            ),
            target_model_id,
            baseline_model_id,
            device=place,
            attacker_options=attacker_options or {},
            target_options=target_options or {},
        )
        check_same_tokens(self.agents["attacker"], self.agents["reference"])
        self.value_head: ValueHead | None = None
        self._reader = Reader(self.agents)

    attacker = tester = auditor = _Part("attacker", "module")
    target, baseline = _Part("target", "module"), _Part("reference", "module")
    tokenizer = attacker_tokenizer = _Part("attacker", "tokenizer")
    tester_tokenizer = auditor_tokenizer = tokenizer
    target_tokenizer = _Part("target", "tokenizer")
    baseline_tokenizer = _Part("reference", "tokenizer")

    # ---- playing

    def tree_sampler(self) -> TreeSampler | TextRollouts:
        if any(is_overridden(self, name, HFASTProblem) for name in TEXT_METHODS):
            return TextRollouts(self)
        rater = rater_of_system(self)
        if rater is None:
            raise ConfigurationError(
                f"{type(self).__name__} needs a scorer for rollouts. Give it one."
            )
        return TreeSampler(
            self.agents["attacker"],
            self.agents["target"],
            self.agents["reference"],
            rater,
            self.reward_parameters(),
            max_cache_bytes=self.max_cache_bytes,
        )

    def rollout_prompt_with_attacker(self, x: Sequence[str]) -> list[Spoken]:
        return self._generate("attacker", x)

    def rollout_prompt_with_target(self, x: Sequence[str]) -> list[Spoken]:
        return self._generate("target", x)

    @torch.no_grad()
    def _generate(self, role: str, texts: Sequence[str]) -> list[Spoken]:
        agent: ConversationAgent = self.agents[role]
        contexts = [self._reader.context_ids(role, text) for text in texts]
        # Drawn from torch's global generator, which the caller may seed.
        uniforms = torch.rand(len(contexts), agent.sampling.max_new_tokens)
        model = agent.token_sampler
        generation = model.generate(contexts, 1, uniforms, agent.sampling)
        require_finite(
            generation.logprobs_BT, generation.mask_BT, role=role, model=model, during="a rollout"
        )
        turns = agent.read_turns(generation)
        ids = [
            row[mask].tolist()
            for row, mask in zip(generation.ids_BT, generation.mask_BT, strict=True)
        ]
        return [
            Spoken(turn.text, tokens, role, turn.num_reasoning_ids)
            for turn, tokens in zip(turns, ids, strict=True)
        ]

    def advance(self, state: str, action: str, response: str) -> str:
        return Conversation([*turns_of(state), action, response])

    def _target_input(self, state: str, action: str) -> str:
        return Conversation([*turns_of(state), action])

    def _advance_and_validate(self, state: str, action: str, response: str) -> str:
        """Return the result of `advance` as a conversation of turns."""
        given = self.advance(state, action, response)
        grown = Conversation([*turns_of(state), action, response])
        # Texts that differ only in white space are equal, and their roles are known.
        if isinstance(given, str) and "".join(given.split()) == "".join(grown.split()):
            return grown
        if isinstance(given, Conversation) and len(given.turns) % 2:
            return given
        raise ConfigurationError(
            f"advance of {type(self).__name__} returned {given!r} for {action!r} and {response!r}, "
            "from which the turns cannot be recovered. Return state + action + response, or fewer "
            "turns: Conversation([*state.turns, action, response][-3:]), an odd number of them. "
            "Set role markers in attacker_options and target_options."
        )

    # ---- log-probabilities

    def get_attacker_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return self._scores("attacker", context, continuation).logprobs_BT

    @torch.no_grad()
    def get_target_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return self._scores("target", context, continuation).logprobs_BT

    @torch.no_grad()
    def get_baseline_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return self._scores("reference", context, continuation).logprobs_BT

    @property
    def samples_as_it_scores(self) -> bool:
        return self._attacker_model.samples_as_it_scores

    def value(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        values_BT = self._scores("attacker", context, continuation, needs_values=True).values_BT
        assert values_BT is not None
        return values_BT

    def token_values(
        self,
        context: Sequence[str],
        continuation: Sequence[str],
        *,
        needs_values: bool = False,
        needs_entropy: bool = False,
    ) -> TokenValues:
        needs = {"needs_values": needs_values, "needs_entropy": needs_entropy}
        cls = type(self)
        is_own = cls.get_attacker_logprobs is not HFASTProblem.get_attacker_logprobs
        if is_own or cls.value is not HFASTProblem.value:
            return super().token_values(context, continuation, **needs)
        return self._scores("attacker", context, continuation, **needs)

    def reference_values(
        self, context: Sequence[str], continuation: Sequence[str]
    ) -> tuple[Tensor, Tensor]:
        if type(self).get_baseline_logprobs is not HFASTProblem.get_baseline_logprobs:
            return super().reference_values(context, continuation)
        with torch.no_grad():
            scores = self._scores("reference", context, continuation)
        return scores.logprobs_BT, scores.mask_BT

    def _scores(
        self,
        role: str,
        context: Sequence[str],
        continuation: Sequence[str],
        *,
        needs_values: bool = False,
        needs_entropy: bool = False,
    ) -> TokenValues:
        """Score all continuations in one pass."""
        model = self.agents[role].token_scorer(to="score messages")
        pairs = [
            self._reader.split(role, before, ids)
            for before, ids in zip(context, continuation, strict=True)
        ]
        cpu = torch.device("cpu")
        ids_BT, mask_BT = pad_right([ids for _, ids in pairs], cpu)
        found = model.token_scores(
            *pad_left([before for before, _ in pairs], cpu),
            ids_BT,
            mask_BT,
            needs_entropy=needs_entropy,
            needs_hidden=needs_values,
        )
        values_BT = None
        if needs_values:
            values_BT = self._required_head()(found.hidden_BTX)
        device = found.logprobs_BT.device
        return TokenValues(found.logprobs_BT, mask_BT.to(device), values_BT, found.entropy_BT)

    # ---- trained modules

    @property
    def _attacker_model(self) -> LanguageModel:
        return as_language_model(self.agents["attacker"].language_model, role="attacker")

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        yield from self._attacker_model.parameters()
        for module in self.modules().values():
            yield from module.parameters()

    def modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules that are trained beside the attacker."""
        return {} if self.value_head is None else {"value_head": self.value_head}

    def add_value_head(self, *, trains_model: bool = False) -> ValueHead:
        """Add a new value head to the attacker and enable `value`.

        Parameters
        ----------
        trains_model : bool
            Whether the value loss also trains the attacker's weights below the head.
        """
        model = self._attacker_model
        head = ValueHead(model.hidden_size, trains_model=trains_model)
        self.value_head = head.to(next(model.parameters()).device)
        return self.value_head

    def _required_head(self) -> ValueHead:
        if self.value_head is None:
            raise ConfigurationError(
                "the problem has no value head. Call add_value_head() before creating the "
                "trainer, so that the optimizer updates it; PPO does."
            )
        return self.value_head

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the attacker, with its adapter merged, and its tokenizer, for transformers."""
        self._attacker_model.save_pretrained(Path(directory))


HFASTSystem = HFASTProblem


class HFEvaluationProblem(HFASTProblem):
    """A trained attacker, loaded from its folder, against a target.

    Parameters
    ----------
    attacker_checkpoint : str
        Folder written by a trainer or `save_pretrained`, also of an adapter, or a hub id; also
        `tester_checkpoint` and `auditor_checkpoint`. One that cannot be read is an error.
    attacker_base_model_id : str, optional
        The attacker before training: the reference, and the source of the tokenizer if the
        checkpoint has none; also `tester_base_model_id` and `auditor_base_model_id`. By default
        the attacker itself, so that likelihoods under the reference are not informative.
    target_model_id : str
        The model under test.
    baseline_model_id : str, optional
        Another reference.
    **options
        See `HFASTProblem`.
    """

    def __init__(
        self,
        attacker_checkpoint: ModelId = None,
        attacker_base_model_id: ModelId = None,
        target_model_id: ModelId = None,
        device: str | torch.device = "cpu",
        scorer: Any = None,
        baseline_model_id: ModelId = None,
        *,
        tester_checkpoint: ModelId = None,
        auditor_checkpoint: ModelId = None,
        tester_base_model_id: ModelId = None,
        auditor_base_model_id: ModelId = None,
        **options: Any,
    ) -> None:
        checkpoint = only_one(
            "the attacker's checkpoint",
            attacker_checkpoint=attacker_checkpoint,
            tester_checkpoint=tester_checkpoint,
            auditor_checkpoint=auditor_checkpoint,
        )
        base = only_one(
            "the model that the attacker was",
            attacker_base_model_id=attacker_base_model_id,
            tester_base_model_id=tester_base_model_id,
            auditor_base_model_id=auditor_base_model_id,
        )
        if base is not None:
            reads = dict(options.pop("attacker_options", None) or {})
            backend = {"base_model": str(base), **reads.get("language_model", {})}
            options["attacker_options"] = {**reads, "language_model": backend}
        super().__init__(
            checkpoint, target_model_id, baseline_model_id or base, scorer, device, **options
        )


HFEvaluationSystem = HFEvaluationProblem
