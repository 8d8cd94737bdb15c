"""Terms added to a probe's reward in training: novelty, entropy, fluency, a scorer's score."""
