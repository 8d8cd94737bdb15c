"""The parts of an experiment: problem, sampler, scorer, algorithm, evaluator."""
