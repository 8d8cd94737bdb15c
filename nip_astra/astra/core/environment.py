"""Alias of `core.sampler`."""

from nip_astra.astra.core.sampler import Environment, Graph, Node, Sampler

__all__ = ["Environment", "Graph", "Node", "Sampler"]
