"""Runners: tokens in, logits or samples out. They join weights in motion, decoder and cache into passes."""

from offload_runtime.runners.draft import DraftModel
from offload_runtime.runners.draft_kv import DraftKVState
from offload_runtime.runners.draft_tree import Asked, Branch, Children, DraftTree
from offload_runtime.runners.graphs import (
    StepGraphs,
    captured_pass_bytes,
    draft_graph_bytes,
    step_graph_bytes,
    tree_positions,
    warm_up_batches,
    warm_up_lengths,
)
from offload_runtime.runners.guess_tree import (
    MOST_LEVELS,
    GuessTree,
    expected_accepted,
    likely_parents,
    most_guess_rows,
    num_guesses,
)
from offload_runtime.runners.target import CapturedPasses, ModelRunner, OnLayer, decide
from offload_runtime.runners.token_window import DeviceWindow, WindowInput, WindowOutput, device_window_bytes
