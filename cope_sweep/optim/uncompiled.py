"""Optimisers of torch that do not import its compiler.

torch keeps its compiler from tracing some methods of an optimiser, and for that imports all of it (torch._dynamo) at
the first call of one of them: a third of the CPU time in which a process gets ready to train. No optimiser is compiled
here, so these are the methods without the decorators.
"""

import inspect

import torch

state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
"""The method of torch.optim.Optimizer, also for an optimiser whose own one needs the state of other workers."""


class _Uncompiled:
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = state_dict
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(_Uncompiled, torch.optim.AdamW):
    """torch.optim.AdamW."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(_Uncompiled, torch.optim.Muon):
    """torch.optim.Muon."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Muon.step))
