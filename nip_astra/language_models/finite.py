"""Log-probabilities that are no numbers stop a run before anything is learnt from them."""

from __future__ import annotations

from torch import Tensor

from nip_astra.errors import NonFiniteOutputError


def refuse_nan(
    logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    role: str,
    model: object,
    during: object,
) -> None:
    """Refuse what a model whose logits overflowed said, or thinks of what was said.

    A single logit that is NaN or +inf makes the log-probabilities of its whole position NaN, so
    those of the tokens drawn show it; their number is small beside that of the logits.

    Parameters
    ----------
    logprobs_BT : Tensor
        Of the tokens of a turn, nats.
    mask_BT : Tensor
        Bool; false on padding, which is not looked at.
    during : object
        What the model was at, for the message.

    Raises
    ------
    NonFiniteOutputError
        Naming the role, the model and the first position.
    """
    is_nan_BT = logprobs_BT.isnan() & mask_BT.to(logprobs_BT.device)
    if not bool(is_nan_BT.any()):
        return
    row, position = is_nan_BT.nonzero()[0].tolist()
    num_rows = int(is_nan_BT.any(dim=1).sum())
    name = getattr(model, "source", None) or type(model).__name__
    raise NonFiniteOutputError(
        f"the {role}'s model {name} was asked for the tokens of a turn in {during}, but its logits "
        f"are no numbers at token {position + 1} of row {row + 1} ({num_rows} of "
        f"{len(logprobs_BT)} rows are affected). Its weights or activations have overflowed: "
        "compute in float32 (language_model.dtype), go back to an earlier checkpoint and lower "
        "the learning rate, or mend the model."
    )
