"""The link: ordered host-to-device copies beside the compute, with events instead of synchronisation.

One engine owns one copy queue. `enqueue` puts a copy behind the ones before it; it starts when the buffer's `free`
event has fired and fires `ready` when the bytes are there. The compute side waits for `ready` before it reads and
fires `free` after its last read. Nothing else orders the two sides, and nothing ever waits for the whole device.

On CUDA the queue is a stream and the events are CUDA events. On the CPU the queue is a worker thread, so that the same
schedule, with real concurrency, runs and is tested anywhere.
"""

from offload_runtime.copy.queue import CopyEngine, CopyQueues, make_copy_engine, measure_link_gbps
from offload_runtime.copy.staging import (
    FEWEST_PIECES,
    MOST_THREADS,
    RingShape,
    StagingCopyEngine,
    StagingWriteEngine,
    ring_shape,
    staging_threads,
)
