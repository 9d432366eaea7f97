"""Short passes of fixed shapes as CUDA graphs: launching one costs what launching a kernel costs.

`StepGraphs` owns those of a target, a draft or a verifier, and what the host and they exchange. Below are the shapes
that steps are rounded up to, as each is a graph, and the bytes that all of it takes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from offload_runtime_kernels.attention_triton import WORKSPACE_BYTES as SPLITS_WORKSPACE_BYTES
from offload_runtime_kernels.copy_words import copy_words
from offload_runtime_kernels.encoded_linear import MOST_ROWS
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.core import BatchShape
from offload_runtime.models.config import ModelConfig
from offload_runtime.params import SamplingParams
from offload_runtime.sampling import WARM_UP_SAMPLINGS
from offload_runtime.stream.device import packed_words
from offload_runtime.trace import TraceRecorder

# Deepest node below the text.
MOST_DEPTH = 256
# The same of a draft whose layers have states: they read the whole path again for each node that a step is about.
MOST_DELTA_DEPTH = 64
# On CUDA a step is about few rows of a sequence or as many as there may be.
NARROW_ROWS = 8
# Reaches of steps that are captured at load, up to 16384 tokens: a draft of longer texts rarely keeps all of them. Of
# those about several texts one less, as all graphs of a load are held.
_MOST_REACHES = 5
# Tokens up to which all steps are captured as one.
_LEAST_REACH = 4 * BLOCK_TOKENS
# Rows of a step: what the products of few rows take.
STEP_ROWS = 32
# The same of copies of few bits, which are larger than most drafts: what products of few rows decode in registers.
COPY_STEP_ROWS = MOST_ROWS
_PRODUCT_ROWS = 8
# Rows of a target's pass up to which it is captured: graphs take memory by their rows, and windows over what is on the
# card rarely have more.
CAPTURED_ROWS = 64
# Parts of what the host and captured passes exchange: two of passes over one token of each sequence, which follow each
# other, and one of windows, behind which the host always waits.
CAPTURED_PARTS = 3
# Nodes of a greedy path behind its first one: so many more steps before the host looks at them.
MOST_GREEDY_STEPS = 7
# Children of a node: the target's token is among a draft's best four 0.97 of the time in code, 0.80 in prose (T = 0.6).
CHILDREN = 8
# A draft's chains need two graphs a power of two of blocks and way of sampling, or four where layers have states, its
# trees up to four, and those that it proposes to a retrieval verifier one a level, for each number of sequences.
MOST_GRAPHS = 24
# Of a target's passes, and the reaches of those that are captured at load: of chains and trees, 11 widths of each.
CAPTURED_GRAPHS, _CAPTURED_REACHES = 3 * MOST_GRAPHS, 2
# Of a graph: kernels of a layer, layers' worth around them, and what the driver keeps of a kernel.
_LAYER_KERNELS, _OTHER_LAYERS, _KERNEL_BYTES = 16, 4, 2048
_LIBRARY_BYTES = 32 << 20  # cuBLAS' workspace of the stream that captures
_LEAST_ROWS = 16  # that the allocator's rounding makes of fewer
# Texts whose steps need other kernels or graphs than one of a token: beyond a block, and so long that chunks are
# chosen.
_WARM_UP_TOKENS = (BLOCK_TOKENS + 1, _LEAST_REACH + 1)


class StepGraphs:
    """Runs steps, on CUDA as replays of graphs. A step reads and writes tensors that never move and returns nothing.

    What a step is about the host writes into page-locked memory, which the step fetches, and it finds there what the
    step shows.

    The first run of a step is an ordinary one: it compiles kernels and loads library modules, which a capture cannot.
    The second captures it, so that what is run once only is not captured, and from then on the graph is replayed.
    All graphs share one memory pool of each device: they have to run one after the other, and from one thread, whose
    library handles the first run makes.

    Args:
        device: Where steps begin and end. On the CPU every run is an ordinary one.
        others: Devices that steps cross to.
        input_words, output_words: The most integers that steps fetch and show.
        most_graphs: More are not held; the one that was not used for longest is dropped.
        end_step: Lets the current stream wait for what a step has begun on others. It is called behind each step, even
            if that breaks off: no capture ends before.

    Attributes:
        inputs: [input_words] int32, device: what the step has fetched.
        inputs_host, outputs_host: The page-locked memory as int32 arrays.
        recorder: Of a trace, if there is one.
    """

    recorder: TraceRecorder | None = None

    def __init__(
        self, device: torch.device, others: Sequence[torch.device] = (), *, input_words: int = 0,
        output_words: int = 0, most_graphs: int = MOST_GRAPHS, end_step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._most_graphs, self._end_step = most_graphs, end_step
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}  # None: has run once; oldest use first
        self._device = device
        self._replays = locked = device.type == "cuda"
        self.inputs = torch.zeros(input_words, dtype=torch.int32, device=device)
        self._inputs_pinned, self._outputs_pinned = (
            torch.zeros(words, dtype=torch.int32, pin_memory=locked and words > 0)
            for words in (input_words, output_words)
        )
        self.inputs_host, self.outputs_host = self._inputs_pinned.numpy(), self._outputs_pinned.numpy()
        self._is_running = False  # the last step may not have fetched its inputs yet
        if self._replays:
            self._stream = torch.cuda.Stream(device)
            self._streams = [torch.cuda.Stream(other) for other in others]  # of what is captured there

    @property
    def num_graphs(self) -> int:
        """Steps whose graphs are held."""
        return sum(made is not None for made in self._graphs.values())

    def span(self, name: str, **args: Any) -> AbstractContextManager[object]:
        """Return what a trace has around steps."""
        return nullcontext() if self.recorder is None else self.recorder.span(name, **args)

    def begin(self) -> None:
        """Wait until the host may write the inputs of another step: the last one may still be running."""
        if self._is_running:
            self.wait()
        self._is_running = True

    def wait(self) -> None:
        """Wait for what the current stream has to do."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._is_running = False

    def fetch(self, words: int, first: int = 0) -> None:
        """Bring so many of what the host has written, from word `first` on, to the device, within a step."""
        copy_words(self._inputs_pinned[first : first + words], self.inputs[:words])

    def show(self, found: torch.Tensor, first: int = 0) -> None:
        """Write a tensor to where the host finds it, from word `first` on, within a step."""
        words = found.view(-1).view(torch.int32)
        copy_words(words, self._outputs_pinned[first : first + len(words)])

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run `step` on the current stream without waiting for the device.

        Args:
            key: Equal keys mean the same launches with the same arguments.
            step: Enqueues the work; must not depend on anything but `key` and the contents of device memory.
        """
        if not self._replays:
            self._enqueue(step)
        elif key not in self._graphs:
            self._enqueue(step)
            self._keep(key, None)
        else:
            made = self._graphs.pop(key) or self._captured(step)
            self._keep(key, made)
            self._replay(made)

    def has(self, key: Hashable) -> bool:
        """Return whether a step is a graph already; on the CPU none need be."""
        return not self._replays or self._graphs.get(key) is not None

    def capture(self, key: Hashable, step: Callable[[], None]) -> None:
        """Have the graph of a step that needs no first run, as others have used all of its kernels. Runs nothing.

        Arguments as of `run`. Where the graph is there already, and on the CPU, there is nothing to do.
        """
        if self._replays and self._graphs.get(key) is None:
            self._graphs.pop(key, None)
            self._keep(key, self._captured(step))

    def warm_up(
        self, take_steps: Callable[[Sequence[SamplingParams], int], None], *, batch: int, lengths: Sequence[int]
    ) -> None:
        """Compile the kernels of a drafter's steps, and capture those about texts of which no token is filtered.

        Args:
            take_steps: Takes steps about as many sequences as it is given options, the first of which has so many
                tokens.
            batch: The most sequences.
            lengths: Tokens of the text, ascending.
        """
        with self.eager():
            for params in WARM_UP_SAMPLINGS[1:]:
                take_steps([params], lengths[0])
        for count in reversed(warm_up_batches(batch)):  # if anything is dropped it is what is rare
            for length in lengths:
                for _ in range(2 if self._replays else 1):  # compiles, then captures
                    take_steps(WARM_UP_SAMPLINGS[:1] * count, length)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Make every run an ordinary one for a while, and keep nothing: what is run once needs no graph."""
        before, self._replays = self._replays, False
        try:
            yield
        finally:
            self._replays = before

    def _keep(self, key: Hashable, made: torch.cuda.CUDAGraph | None) -> None:
        self._graphs[key] = made
        if self.num_graphs > self._most_graphs:
            oldest = next(key for key, made in self._graphs.items() if made is not None)
            torch.cuda.current_stream(self._device).synchronize()  # it may still be running
            if (dropped := self._graphs.pop(oldest)) is not None:
                dropped.reset()

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay on the current stream, in order with those of the other devices."""
        if not self._streams:
            graph.replay()
            return
        current = torch.cuda.current_stream(self._device)
        others = [torch.cuda.current_stream(stream.device) for stream in self._streams]
        for other in others:
            current.wait_stream(other)
        graph.replay()
        for other in others:
            other.wait_stream(current)

    def _captured(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record `step` without running it.

        Not through `torch.cuda.graph`, which waits for the whole device and empties the allocator's cache: copies of
        weights go on meanwhile. For the same reason other threads may do what they like.
        """
        if not self.num_graphs:  # the allocator forgets a pool with its last graph
            self._pool = torch.cuda.graph_pool_handle()
            self._pools = [_pool_of(stream.device) for stream in self._streams]
        made = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), ExitStack() as undo:
            # What a collection frees may need calls that a capture forbids, such as unlocking host memory.
            undo.enter_context(_without_collections())
            made.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            undo.callback(made.capture_end)
            with self._on_other_devices():
                self._enqueue(step)
        return made

    def _enqueue(self, step: Callable[[], None]) -> None:
        try:
            step()
        finally:
            self._end_step()

    @contextmanager
    def _on_other_devices(self) -> Iterator[None]:
        """Make what a step does on the other devices a part of a capture."""
        with ExitStack() as undo:
            for stream, pool in zip(self._streams, self._pools, strict=True):
                stream.wait_stream(self._stream)
                undo.callback(self._stream.wait_stream, stream)  # a capture that breaks off needs it, too
                undo.enter_context(torch.cuda.use_mem_pool(pool, stream.device))
                undo.enter_context(torch.cuda.stream(stream))
            with torch.cuda.device(self._device):
                yield


@contextmanager
def _without_collections() -> Iterator[None]:
    """Let nothing be freed by the garbage collector for a while."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _pool_of(device: torch.device) -> torch.cuda.MemPool:
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


def warm_up_batches(batch: int) -> list[int]:
    """Return the numbers of sequences, up to `batch`, that steps are made for: kernels are for powers of two of
    rows."""
    return [*(1 << power for power in range((batch - 1).bit_length())), batch]


def warm_up_lengths(longest: int) -> list[int]:
    """Return the tokens of texts, up to `longest`, whose steps need other kernels or graphs than those of a text of one
    token: with it one of each reach up to 2048."""
    return sorted({min(length, longest) for length in _WARM_UP_TOKENS if longest > 1})


def graph_reach(max_tokens_with_draft: int, capacity_tokens: int) -> int:
    """Return the tokens that a captured step looks at: those that it has to, up to a power of two of blocks and at
    least 1024, as far as there are any, so that few graphs are needed."""
    most = -(-capacity_tokens // BLOCK_TOKENS)
    blocks = -(-max(max_tokens_with_draft, _LEAST_REACH) // BLOCK_TOKENS)
    return min(1 << (blocks - 1).bit_length(), most) * BLOCK_TOKENS


def captured_width(width: int) -> int:
    """Return the rows of each window that a captured pass fills windows of `width` up to: products of few rows take
    eight at a time, so that few shapes cost nothing."""
    return min(1 << (width - 1).bit_length(), -(-width // _PRODUCT_ROWS) * _PRODUCT_ROWS)


def captured_pass_shape(shape: BatchShape, capacity_tokens: int) -> BatchShape:
    """Return the shape that a pass over windows is rounded up to where each is a CUDA graph.

    Args:
        shape: What the windows need.
        capacity_tokens: Of a sequence with its window.
    """
    depth = CAPTURED_ROWS if shape.depth else 0  # of trees one: each number of shapes is multiplied by it
    return BatchShape(shape.batch, captured_width(shape.width), depth, graph_reach(shape.reach, capacity_tokens))


def texts_to_capture(capacity_tokens: int) -> list[int]:
    """Return the tokens of texts behind which passes are captured at load, one for each reach."""
    lengths = [0, *(_LEAST_REACH << power for power in range(_CAPTURED_REACHES - 1))]
    return [length for length in lengths if length + CAPTURED_ROWS <= capacity_tokens]


def widths_to_capture(most: int) -> list[int]:
    """Return the rows of windows of up to `most` whose passes are captured at load."""
    return sorted({captured_width(width) for width in range(1, 1 + min(most, CAPTURED_ROWS))})


def captured_pass_bytes(config: ModelConfig, element_bytes: int, batch: int) -> int:
    """Return the device bytes of the CUDA graphs of a target's passes over so many sequences, of what they read and
    write, and of what they allocate."""
    rows, has_head = CAPTURED_ROWS, not config.is_part
    inputs = 4 * (CAPTURED_PARTS * packed_words(BatchShape(rows, 1, rows, 0).sizes) + rows * (config.num_angles + 1))
    activations = step_activation_bytes(config, element_bytes, rows=rows, has_head=has_head)
    activations += 2 * SPLITS_WORKSPACE_BYTES
    logits = rows * (config.vocab_size if has_head else config.hidden_size) * element_bytes
    graphs = step_graph_bytes(config.num_layers, CAPTURED_GRAPHS)
    return graphs + inputs + logits + activations + batch * config.crossing_bytes


def step_graph_bytes(num_layers: int, most_graphs: int = MOST_GRAPHS) -> int:
    """Return the device bytes of the graphs of a model's steps, but for what a step allocates, which they share."""
    nodes = most_graphs * (num_layers + _OTHER_LAYERS) * _LAYER_KERNELS * _KERNEL_BYTES
    return nodes + _LIBRARY_BYTES


def step_activation_bytes(
    config: ModelConfig, element_bytes: int, *, rows: int, has_head: bool = True, depth: int = 0
) -> int:  # fmt: skip
    """Return the device bytes that the pass of a step allocates, sampling included.

    Args:
        config: The model's shape.
        element_bytes: Of its dtype.
        rows: Of the step, all sequences together.
        has_head: Whether logits are made here.
        depth: Most rows of a path that layers with states read for each row; 0 where they read rows as they are.
    """
    row, paths_bytes = config.hidden_size + config.row_elements, 0
    for delta in {*config.deltas.values()} if depth else ():
        paths_bytes = rows * (depth * delta.row_elements * element_bytes + 3 * delta.crossing_bytes)
    logits = rows * config.vocab_size * (element_bytes + 6 * 4)  # fp32 copies while sampling with filters
    return max(_LEAST_ROWS, rows) * row * element_bytes + paths_bytes + (logits if has_head else 0)


def captured_shape(shape: BatchShape, *, width: int, capacity_tokens: int) -> BatchShape:
    """Return the shape that a step over trees is rounded up to where every shape is a CUDA graph: few rows or all, by
    powers of two.

    Args:
        shape: What the step needs, but for paths as long as there are any.
        width: Most rows of each sequence.
        capacity_tokens: Of a text and a path behind it.
    """
    rows = min(NARROW_ROWS, width) if shape.width <= NARROW_ROWS else width
    return BatchShape(shape.batch, rows, shape.depth, graph_reach(shape.reach, capacity_tokens))


def captured_shapes(batch: int, width: int, depth: int, capacity_tokens: int) -> list[BatchShape]:
    """Return the shapes of steps about one text, or about several of about the same length: what is captured at load.
    Arguments as of `BatchShape` and `captured_shape`."""
    reaches = {min(_LEAST_REACH << power, capacity_tokens) for power in range(_MOST_REACHES - (batch > 1))}
    shapes = [BatchShape(batch, rows, depth, reach) for reach in sorted(reaches) for rows in (1, width)]
    return list(dict.fromkeys(captured_shape(one, width=width, capacity_tokens=capacity_tokens) for one in shapes))


def tree_input_sizes(shape: BatchShape) -> list[int]:
    """Return the integers of each part of the inputs of a step over trees: those of a pass; of each sequence its
    start, RoPE shift and last row; cache positions of the greedy paths by step; how many of their steps have been
    made; and of each row of a head the hidden states that it reads and writes."""
    return [*shape.sizes, *[shape.batch] * 3, MOST_GREEDY_STEPS * shape.batch, 1, *[shape.num_rows] * 2]


def tree_input_words(batch: int) -> int:
    """Return the input words of the largest step of so many sequences or fewer."""
    return packed_words(tree_input_sizes(BatchShape(batch, -(-STEP_ROWS // batch), MOST_DEPTH, 0)))


def tree_positions(tree_nodes: int, *, few: bool = False) -> int:
    """Return the spare positions of each sequence for proposals of `tree_nodes`.

    Nodes of a window, mostly as many as it has, and many times as many of what is drafted past it while it is
    verified: a pass of a streamed target leaves time for thousands. A draft of 30 layers had used up 8 times as many as
    a window's (256) after two thirds of a pass of 0.29 s. `few` are enough where layers have states, which are 18 times
    as many bytes of each as keys and values (0.8B), and of a copy of the target's layers, of whose steps a pass leaves
    time for tens.
    """
    return (4 if few else 12) * tree_nodes + STEP_ROWS


def draft_graph_bytes(config: ModelConfig, element_bytes: int, *, rows: int, batch: int, trees: bool) -> int:
    """Return the device bytes of the CUDA graphs of a draft's steps over `rows`; `trees`: also of those that grow
    trees."""
    if not trees:
        return step_graph_bytes(config.num_layers) + step_activation_bytes(config, element_bytes, rows=rows, depth=1)
    tree_rows = max(STEP_ROWS, batch)
    outputs = (tree_rows + (MOST_GREEDY_STEPS + 1) * batch) * 2 * CHILDREN
    words = tree_input_words(batch) + outputs + tree_rows * config.num_angles
    activations = step_activation_bytes(config, element_bytes, rows=max(rows, tree_rows), depth=MOST_DELTA_DEPTH)
    return step_graph_bytes(config.num_layers, 2 * MOST_GRAPHS) + activations + 4 * words
