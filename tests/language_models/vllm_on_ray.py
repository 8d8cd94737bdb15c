"""Two iterations of ast_dpo whose attacker is sampled by vLLM engines in actors of Ray.

    python -m tests.language_models.vllm_on_ray FOLDER NUM_ENGINES full|lora|own [STORE]

With 0 engines there is one in this process. With `own` the target has its own engine, and
scores probes: beside the metrics is the distance of these scores from those that transformers
computes. With a store, a new file, this is one of several processes among which the weights are
divided, as RANK and WORLD_SIZE say. Run with an interpreter that has vLLM for CPUs; prints the
metrics of each iteration as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nip_astra.distributed.launch import rank_of_process
from nip_astra.distributed.team import open_team
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import Turns, pad_left, pad_right
from nip_astra.language_models.vllm import VllmSession
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from tests.kit.tiny import CPU, load_backend, make_language_model, write_scenario

FAST = (
    *("training.num_iterations=2", "training.num_episodes_per_experience=4", "training.lr=0.01"),
    *("training.eval_period=1", "ast_chat.evaluation.use_random_search=false"),
    *("ast_chat.evaluation.num_episodes=2", "ast_chat.evaluation.num_dev_episodes=2"),
)


def main(runs_dir: Path, num_engines: str, kind: str, store: str | None = None) -> None:
    # Equal in all processes.
    folder = runs_dir / f"files_{rank_of_process()}"
    folder.mkdir(parents=True)
    scenario = write_scenario(folder)
    # The attention kernel for CPUs requires heads of at least 32.
    model = make_language_model(folder / "sampled", seed=1, head_size=32)
    engine = {"_type": "vllm", "model": str(model), "dtype": "float32", "decode_graphs": "never"}
    # Share of the machine's memory, as there is no GPU.
    engine["gpu_memory_utilization"] = 0.05
    if num_engines != "0":
        engine |= {"num_engines": int(num_engines), "gpus_per_engine": 0}
    lora = {} if kind == "full" else {"lora": {"rank": 8}}
    given = [f"ast_chat.attacker.language_model={json.dumps(engine | lora)}"]
    if kind != "full":
        # The same engine without the adapter.
        own = {"max_model_len": 80} if kind == "own" else {}
        given.append(f"ast_chat.target.language_model={json.dumps(engine | own)}")
    if kind == "own":
        given.append("ast_chat.reward.likelihood_model=target")
    resolved = resolve_experiment(
        trainer="ast_dpo", scenario=str(scenario), overrides=[*FAST, *given]
    )
    gaps: list[float] = []
    with open_team(CPU, store) as team:
        settings = ExperimentSettings(progress=False, sharding="none" if store is None else "fsdp")
        trainer: Any = prepare_experiment(resolved, settings, team=team).trainer
        trainer.tracker.log_metrics = lambda metrics, step: print(json.dumps(metrics))
        if kind == "own":
            attacker, target = trainer.sampler.attacker, trainer.sampler.target
            assert attacker.language_model.engine is not target.language_model.engine
            VllmSession.generate = compared_generate(model, gaps)  # type: ignore[method-assign]
        trainer.train()
    if gaps:
        print(json.dumps({"num_compared": len(gaps), "largest_gap": max(gaps)}))


def compared_generate(folder: Path, gaps: list[float]) -> Callable[..., Turns]:
    """Replacement of `VllmSession.generate` that records the error of span scores.

    The error is in nats per token, against transformers with the weights in a folder.
    """
    exact = load_backend(folder, trainable=False, dtype="float32")
    generate = VllmSession.generate

    def compared(self: Any, contexts: Any, *asked: Any, spans: Any = None, **more: Any) -> Turns:
        turns = generate(self, contexts, *asked, spans=spans, **more)
        if spans is not None:
            places = list(zip(contexts, spans, strict=True))
            before = pad_left([context[:start] for context, (start, _) in places], CPU)
            read = pad_right([context[start:stop] for context, (start, stop) in places], CPU)
            gap_CT = exact.logprobs(*before, *read) - turns.span_logprobs_CT
            gaps.append(float(gap_CT.abs().max()))
        return turns

    return compared


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
