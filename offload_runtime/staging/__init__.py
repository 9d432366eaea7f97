"""Where RAM is enough and page-locking is not: pageable memory crosses the link through page-locked pieces."""

from offload_runtime.staging.ring import FEWEST_PIECES, MOST_THREADS, RingShape, ring_shape, staging_threads
from offload_runtime.staging.to_device import StagingCopyEngine
from offload_runtime.staging.to_host import StagingWriteEngine

__all__ = [
    "FEWEST_PIECES",
    "MOST_THREADS",
    "RingShape",
    "StagingCopyEngine",
    "StagingWriteEngine",
    "ring_shape",
    "staging_threads",
]
