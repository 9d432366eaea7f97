"""Keys and values of committed and tentative tokens, in blocks of 256 tokens: on the device, or in host memory."""

from offload_runtime.kv.cache import KVCache, LayerCache
from offload_runtime.kv.device import DeviceKVCache, block_bytes, kv_cache_bytes, num_blocks
from offload_runtime.kv.host import KV_RING_SLOTS, HostKVCache, kv_piece_bytes, ring_blocks
from offload_runtime.kv.host_blocks import BlockLocking, HostBlocks
from offload_runtime.kv.prefill import prefill_workspace_bytes

__all__ = [
    "KV_RING_SLOTS",
    "BlockLocking",
    "DeviceKVCache",
    "HostBlocks",
    "HostKVCache",
    "KVCache",
    "LayerCache",
    "block_bytes",
    "kv_cache_bytes",
    "kv_piece_bytes",
    "num_blocks",
    "prefill_workspace_bytes",
    "ring_blocks",
]
