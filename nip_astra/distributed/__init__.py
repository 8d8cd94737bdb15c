"""One run in several processes, on torch.distributed."""
