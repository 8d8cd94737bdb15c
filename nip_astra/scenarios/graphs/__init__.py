"""Graph isomorphism: pairs of graphs, and the networks that read them."""
