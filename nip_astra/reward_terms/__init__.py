"""Terms that training adds to the reward of a probe: novelty, entropy, fluency, a scorer's view."""
