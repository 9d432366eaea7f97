"""Decoder maths of the Llama family; weights, cache and rows are passed in."""

from offload_runtime.model.decoder import Decoder, Weights
from offload_runtime.model.rope import RopeTable, RowFrequencies
from offload_runtime.model.rows import PassRows, PassShape, RowBuilder, Window, depths_of, paths_below_roots
