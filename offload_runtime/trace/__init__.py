"""What happened when: spans of passes, copies, layers, drafting and the host, for the file that `--trace` names.

Beside the token's journey, not on it: whoever works on a token tells a `TraceRecorder` when it did, if there is one.
"""

from offload_runtime.trace.chrome import TRACE_VERSION, require_writable, write_trace
from offload_runtime.trace.recorder import (
    COMPUTE,
    DRAFT,
    HOST,
    LINK,
    LINK_BACK,
    PASSES,
    STALLS,
    CopyLog,
    Label,
    OnDone,
    TraceRecorder,
    covered_seconds,
    make_clock,
    union_seconds,
)
