"""Alias of `core.system`."""

from nip_astra.astra.core.system import Problem, System, ValueFunctionProblem, ValueFunctionSystem

__all__ = ["Problem", "System", "ValueFunctionProblem", "ValueFunctionSystem"]
