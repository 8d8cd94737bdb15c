"""Parts of scenarios about images: datasets, networks of agents, and pretrained embeddings."""
