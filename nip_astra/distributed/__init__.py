"""Training of one run in several processes, with torch.distributed."""
