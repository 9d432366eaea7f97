"""Keys and values of committed and tentative tokens, in blocks of 256 tokens: on the device, or in host memory."""

from offload_runtime.cache.delta import ANCHOR_TOKENS, anchor_bytes, state_bytes, step_bytes
from offload_runtime.cache.device import KVCache, block_bytes, num_blocks
from offload_runtime.cache.host import HostKVCache
from offload_runtime.cache.host_io import KV_RING_BUFFERS, HostKVCard, kv_piece_bytes, ring_blocks
from offload_runtime.cache.saved_blocks import BlockFiles, BlockLayout, BlockStore, block_names
