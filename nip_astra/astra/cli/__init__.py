"""The command line under ASTRA-RL's name."""
