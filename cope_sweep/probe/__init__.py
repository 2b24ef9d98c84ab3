"""Probes of a checkpoint: what its heads count, where they look, and how well that goes with separators."""

from cope_sweep.probe.matrices import Counted, LayerProbe, Probe, ProbeError, each_layer, probe

__all__ = ["Counted", "LayerProbe", "Probe", "ProbeError", "each_layer", "probe"]
