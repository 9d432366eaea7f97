"""What transformers' offloaded KV cache costs the link, told from the lengths of its passes.

`DynamicCache(offloading=True)` (5.17 and 5.23): while one layer computes, the next one's keys and values are copied to
the device, all of them; after its new ones were joined to them, all go back to the host. So a pass brings every layer
once as long as it was before, and returns it as long as it has become (and with it proposals that are dropped later,
which are not counted here: a few tokens in thousands).
"""

from __future__ import annotations

from collections.abc import Sequence

from runs import KVTraffic

from offload_runtime.config import ModelConfig


def offloaded_traffic(
    config: ModelConfig, itemsize: int, *, prompt_tokens: int, counts: Sequence[int]
) -> KVTraffic | None:
    """Of all passes but the first, which reads the prompt.

    Args:
        config: The model's shape.
        itemsize: Bytes of one number of keys and values.
        prompt_tokens: Of the prompt.
        counts: Tokens that each round gave.

    Returns:
        None for a model with sliding windows: what their layers keep depends on more than lengths.
    """
    if any(window is not None for window in config.layer_windows):
        return None
    per_token = config.kv_bytes_per_token(itemsize)
    to_device = to_host = 0
    length = prompt_tokens + counts[0] - 1  # the newest token is read by the pass behind it
    for count in counts[1:]:
        to_device += length * per_token
        length += count
        to_host += length * per_token
    return KVTraffic(to_device, to_host)
