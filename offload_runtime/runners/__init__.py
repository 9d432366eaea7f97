"""Runners: tokens in, logits or samples out. They join weights in motion, layers and cache into passes."""

from offload_runtime.runners.draft_kv import DraftKVState
from offload_runtime.runners.graphs import StepGraphs
from offload_runtime.runners.head_decoder import HeadDecoder
from offload_runtime.runners.model_runner import CapturedPasses, Decoder, HiddenTaps, ModelRunner, OnLayer, decide
