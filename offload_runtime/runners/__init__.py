"""Runners: tokens in, logits or samples out. They join weights in motion, decoder and cache into passes."""

from offload_runtime.runners.device_window import DeviceWindow, device_window_bytes
from offload_runtime.runners.draft import DraftModel, DraftRunner
from offload_runtime.runners.passes import ModelRunner, PassShape
from offload_runtime.runners.step_graph import StepGraphs, step_graph_bytes

__all__ = [
    "DeviceWindow",
    "DraftModel",
    "DraftRunner",
    "ModelRunner",
    "PassShape",
    "StepGraphs",
    "device_window_bytes",
    "step_graph_bytes",
]
