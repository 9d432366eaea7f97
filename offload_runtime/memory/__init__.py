"""Memory with hard limits: page-aligned host arenas, what of them is page-locked, and a ledger of device memory.

The lowest room: it knows bytes and devices, and nothing of what lies in them.
"""

from offload_runtime.memory.arena import (
    PAGE_BYTES,
    HostArena,
    PageableMemory,
    Registrar,
    check_host_memory,
    host_memory,
    registrar_for,
    require_readable_arenas,
    touch,
)
from offload_runtime.memory.cards import (
    Card,
    LayerPartition,
    Transfer,
    TransferBuffers,
    aligned_bytes,
    are_blocks,
    reaches,
    receive,
    send,
    transfer,
)
from offload_runtime.memory.device import (
    LAZY_MODULE_BYTES,
    TYPICAL_CONTEXT_BYTES,
    DeviceBudget,
    current_device,
    device_memory_in_use,
    device_memory_used_by_others,
    memory_name,
    overwrite,
    pack,
    pack_words,
    packed_words,
    resolve_device,
    resolve_devices,
    unpack,
    upload,
    within,
)
