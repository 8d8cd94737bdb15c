"""Which parameters a number depends on, to tell a value function that nothing trains."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nip_astra.astra.core.system import System, TokenValues
from nip_astra.errors import ConfigurationError


def check_value_is_trained(system: System[Any, Any], found: TokenValues) -> None:
    """Refuse a value function that training would leave as it is.

    Its own part, which the log-probabilities do not depend on, must be among `parameters()`; part
    of it suffices, since the rest may be frozen on purpose.

    Raises
    ------
    ConfigurationError
        When values carry no gradient, or depend on parameters of their own of which none is there.
    """
    assert found.values_BT is not None
    name = type(system).__name__
    if not found.values_BT.requires_grad:
        raise ConfigurationError(
            f"the values of {name} were to be trained, but they carry no gradient. Compute them "
            "outside torch.no_grad(), by a model whose parameters require gradients, or give PPO "
            "vf_loss_coef=0."
        )
    shared = {id(leaf) for leaf in leaves_of(found.logprobs_BT)}
    own = [leaf for leaf in leaves_of(found.values_BT) if id(leaf) not in shared]
    trained = {id(parameter) for parameter in system.parameters()}
    if own and not any(id(leaf) in trained for leaf in own):
        shapes = ", ".join(str(list(leaf.shape)) for leaf in own[:4])
        raise ConfigurationError(
            f"the values of {name} were to be trained, but the {len(own)} tensors of its value "
            f"head (shapes {shapes}) are not among parameters(), so that no optimizer changes "
            "them. Let parameters() give them too: yield from self.attacker.parameters(); yield "
            "from self.value_head.parameters()."
        )


def leaves_of(value: Tensor) -> list[Tensor]:
    """The parameters that a tensor was computed from, as autograd recorded it."""
    leaves: list[Tensor] = []
    seen: set[Any] = set()
    waiting = [value.grad_fn]
    if value.grad_fn is None and value.requires_grad:
        return [value]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        waiting += [parent for parent, _ in node.next_functions]
    return leaves
