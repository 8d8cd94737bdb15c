"""Held-out accuracy before and after training `remote_api_grpo` through a local Tinker server.

python benchmarks/learning_by_tinker.py --seeds 0 1 2
"""

from __future__ import annotations

import json

from measuring import build_parser, seconds_of

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.serve.local_service import start_service

SERVICE = "remote_api_grpo.train_service"
LORA = "task.policy.language_model.lora"


def main() -> None:
    """Train with each seed, and print a JSON row per seed."""
    options = build_parser(__doc__, seeds=[0, 1, 2], steps=60).parse_args()
    models = {"policy": "scenario://arithmetic/models/policy"}
    with start_service(models, protocols=["tinker"], num_threads=1) as service:
        for seed in options.seeds:
            resolved = resolve_experiment(
                trainer="remote_api_grpo",
                overrides=[
                    f"seed={seed}",
                    f"training.num_iterations={options.steps}",
                    "training.lr=2e-3",
                    f"{SERVICE}.backend=tinker",
                    f"{SERVICE}.base_url={service.base_url}",
                    f"{SERVICE}.model=policy",
                    f"{LORA}.rank=16",
                    f"{LORA}.alpha=32",
                    "task.policy.min_new_tokens=0",
                    "task.task.levels=[1]",
                    "task.evaluation.num_problems=200",
                ],
            )
            trainer = prepare_experiment(resolved, ExperimentSettings(progress=False)).trainer
            row = {
                "seed": seed,
                "seconds": round(seconds_of(trainer.train)),
                **{
                    f"{when}_{name}": trainer.results[when][name]
                    for when in ("before", "after")
                    for name in ("accuracy", "accuracy_interval")
                    if trainer.results.get(when)
                },
                "before": trainer.state.before,
            }
            print(json.dumps(row, default=str), flush=True)


if __name__ == "__main__":
    main()
