"""Train, evaluate, compare, sweep and report with the package alone; argument: a runs folder."""

import sys
from pathlib import Path

import nip_astra as na

folder = Path(sys.argv[1])
settings = {"runs_dir": str(folder)}
small = {
    "rl.num_iterations": 1,
    "rl.num_test_iterations": 1,
    "rl.frames_per_batch": 63,
    "rl.pretrain_agents": False,
    "graph_isomorphism.dataset.num_train": 60,
    "graph_isomorphism.dataset.num_test": 30,
}
experiment = {"trainer": "vanilla_ppo", "scenario": "graph_isomorphism_small", "overrides": small}

view = na.show(**experiment)
print(len(view.parameters), "parameters;", na.dry_run(view.experiment, progress=False).estimate)

for seed in (0, 1):
    resolved = na.resolve_experiment(**experiment, seed=seed)
    na.run_experiment(resolved, run_id=f"seed_{seed}", progress=False, **settings)

trained = na.evaluate("seed_0", settings=settings, progress=False)
untrained = na.evaluate("seed_0", untrained=True, settings=settings, progress=False)
comparison = na.compare(untrained.path, trained.path)
print(comparison)
na.export("seed_0", "csv", folder / "csv", settings=settings)

found = na.run_sweep(
    folder / "sweep",
    progress=False,
    trainers=["vanilla_ppo"],
    scenarios=["graph_isomorphism_small"],
    seeds=[0],
    grid={name: [value] for name, value in small.items()},
)
print(len(found.rows), "runs")
print(na.write_report([folder / "seed_0", folder / "seed_1"], folder / "comparison.html"))
