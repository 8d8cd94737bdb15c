"""Image datasets, networks of agents, and pretrained embeddings."""
