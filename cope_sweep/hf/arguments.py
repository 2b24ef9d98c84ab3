"""Arguments of a model's call that ask for what is not computed.

Shapes: B sequences, T new tokens, S all tokens (those of the cache first).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cope_sweep.errors import InvalidValue


def check_positions(position_ids: Tensor | None, is_token_BS: Tensor, new: int, *, is_relative: bool) -> None:
    """Raise InvalidValue (`not_computed`) for positions that do not count the tokens of each row.

    Args:
        position_ids: of the new tokens, (B, T) or (1, T). At padding they may be anything: transformers gives it 0, 1
            or a neighbour's.
        is_token_BS: False at padding, (B, S).
        new: T.
        is_relative: whether only distances count. The numbers of columns then do as well, unless there is padding
            between tokens: the padding on the left moves all positions alike.

    """
    if position_ids is None:
        return
    (B, S), T = is_token_BS.shape, new
    fits = position_ids.dim() == 2 and position_ids.shape[0] in (1, B) and position_ids.shape[1] == T
    if fits:
        is_token_BT = is_token_BS[:, S - T :]
        column_S = torch.arange(S, device=is_token_BS.device)
        count_BS = is_token_BS.long().cumsum(dim=1) - 1
        ids_BT = position_ids.to(is_token_BS.device)
        fits_B = ((ids_BT == count_BS[:, S - T :]) | ~is_token_BT).all(dim=1)
        if is_relative:
            first_B1 = is_token_BS.long().argmax(dim=1, keepdim=True)
            is_gapless_B = ((count_BS == column_S - first_B1) | ~is_token_BS).all(dim=1)
            fits_B |= is_gapless_B & ((ids_BT == column_S[S - T :]) | ~is_token_BT).all(dim=1)
        fits = bool(fits_B.all())
    if not fits:
        raise InvalidValue(
            "position_ids: they have to count the tokens of each row from 0, those of the cache included, which those "
            "of packed sequences do not; put each sequence into a row of its own, with padding on the left for "
            "generate, or leave position_ids out",
            code="not_computed",
            argument="position_ids",
        )
