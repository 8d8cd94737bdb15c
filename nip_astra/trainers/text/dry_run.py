"""What a whole run would ask of its services, from a few rollouts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from nip_astra.samplers.answer_journal import AnswerJournal
from nip_astra.samplers.text_arrays import rollouts_of
from nip_astra.trainers.service_use import total_cost

if TYPE_CHECKING:
    from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer

NUM_ROLLOUTS = 4
"""Rollouts that are played."""


def estimate_cost(trainer: PureTextRlTrainer) -> dict[str, Any]:
    """Play a few rollouts as they are trained on and as they are tested, and extrapolate.

    The time is an upper bound: a model in this process answers many requests in hardly more time
    than a few.
    """
    num_iterations = trainer.text_rl.num_iterations
    num_tests = sum(
        trainer.is_test_due(number, is_last=number == num_iterations - 1)
        for number in range(num_iterations)
    )
    train = trainer.episodes("train", 0)
    num_tested = num_tests * len(trainer.episodes("test", 0))
    parts = [
        _measure(trainer, trainer.num_branches, num_iterations * len(train), is_test=False),
        _measure(trainer, 1, num_tested, is_test=True),
    ]
    learning = [one for one in trainer.shared_model_groups.values() if not one.is_frozen]
    prices = {"cost": sum(part.pop("cost") for part in parts)}
    known = total_cost(trainer.services()) is not None
    return {
        "num_iterations": num_iterations,
        "num_rollouts": num_iterations * len(train) + num_tested,
        "num_jobs": (num_iterations - 1) * len(learning),
        **{name: round(sum(part[name] for part in parts)) for name in parts[0] if name != "hours"},
        "most_hours_of_sampling": sum(part["hours"] for part in parts),
        **(prices if known else {}),
    }


def _measure(
    trainer: PureTextRlTrainer, num_branches: int, count: int, *, is_test: bool
) -> dict[str, float]:
    """What so many rollouts would take."""
    episodes, journal = trainer.episodes("train", 0)[:NUM_ROLLOUTS], AnswerJournal()
    key = (trainer.hyper_params.seed, "dry run", num_branches)
    for group in trainer.shared_model_groups.values():
        # Loading one takes longer than playing a few rollouts, and is done once.
        _ = group.model
    started, cost_before = time.perf_counter(), total_cost(trainer.services()) or 0.0
    ends = trainer.instance.loop.run(
        trainer.sampler.sample(episodes, key=key, num_branches=num_branches, journal=journal)
    )
    factor = count / len(episodes)
    prompt_tokens, completion_tokens = journal.tokens()
    cost = (total_cost(trainer.services()) or 0.0) - cost_before
    analysis = trainer.instance.analysis
    num_judged = 0
    is_judged = analysis is not None and (is_test or analysis.are_train_rollouts_judged)
    if is_judged and trainer.analyses is not None:
        counts = trainer.analyses.count_requests(rollouts_of(trainer.game, ends))
        num_judged = sum(counts.values())
    return {
        "num_requests": len(journal) * factor,
        "prompt_tokens": prompt_tokens * factor,
        "completion_tokens": completion_tokens * factor,
        **({} if analysis is None else {"num_judge_requests": num_judged * factor}),
        "cost": cost * factor,
        "hours": (time.perf_counter() - started) * factor / 3600,
    }
