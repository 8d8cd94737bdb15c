"""What an experiment is made of: problem, sampler, scorer, algorithm, evaluator."""
