"""Decoder maths of the Llama family; weights, cache and rows are passed in."""

from offload_runtime.model.decoder import Decoder, LayerCache
from offload_runtime.model.fused_layer import fused_decoder_layer, fused_embed, fused_head
from offload_runtime.model.rope import RopeTable
from offload_runtime.model.rows import PassRows, RowBuilder, Window, depths_of

__all__ = [
    "Decoder",
    "LayerCache",
    "PassRows",
    "RopeTable",
    "RowBuilder",
    "Window",
    "depths_of",
    "fused_decoder_layer",
    "fused_embed",
    "fused_head",
]
