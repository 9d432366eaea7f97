"""The link and the memory on both its sides: ordered copies beside the compute, with events instead of synchronisation.

One engine owns one copy queue. `enqueue` puts a copy behind the ones before it; it starts when the buffer's `free`
event has fired and fires `ready` when the bytes are there. The compute side waits for `ready` before it reads and
fires `free` after its last read. Nothing else orders the two sides, and nothing ever waits for the whole device.

On CUDA the queue is a stream and the events are CUDA events. On the CPU the queue is a worker thread, so that the same
schedule, with real concurrency, runs and is tested anywhere.

The lowest room: it knows bytes, devices and links, and nothing of what lies in the bytes.
"""

from offload_runtime.stream.arena import (
    PAGE_BYTES,
    PIECE_BYTES,
    HostArena,
    Registrar,
    Staging,
    check_host_memory,
    own_or,
    registrar_for,
    touch,
)
from offload_runtime.stream.copy_engine import CopyEngine, measure_link_gbps
from offload_runtime.stream.device import (
    Card,
    DeviceBudget,
    LayerPartition,
    Transfer,
    TransferBuffers,
    aligned_bytes,
    current_device,
    device_memory_used_by_others,
    overwrite,
    pack,
    pack_words,
    packed_words,
    reaches,
    receive,
    resolve_device,
    resolve_devices,
    send,
    transfer,
    unpack,
    upload,
    within,
)
from offload_runtime.stream.queue import make_copy_engine
from offload_runtime.stream.staging import FEWEST_PIECES, RingShape, ring_shape, staging_threads
