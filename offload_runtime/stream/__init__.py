"""The link and the memory on both its sides: ordered copies beside the compute, with events instead of synchronisation.

One engine owns one copy queue. `enqueue` puts a copy behind the ones before it; it starts when the buffer's `free`
event has fired and fires `ready` when the bytes are there. The compute side waits for `ready` before it reads and
fires `free` after its last read. Nothing else orders the two sides, and nothing ever waits for the whole device.

On CUDA the queue is a stream and the events are CUDA events. On the CPU the queue is a worker thread, so that the same
schedule, with real concurrency, runs and is tested anywhere.

The lowest room: it knows bytes, devices and links, and nothing of what lies in the bytes.
"""
