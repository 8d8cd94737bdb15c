"""Language-model backends: tokens in, tokens and log-probabilities out. They know no roles."""
