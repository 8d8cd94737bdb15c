"""Language-model backends: tokens in, tokens and log-probabilities out; independent of roles."""
