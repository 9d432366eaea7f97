"""Launches of the attention kernels: in parts that fit a workspace, over whole caches, pieces and rings."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from offload_runtime_kernels._jit import is_roomy, overlap_options, triton
from offload_runtime_kernels.attention_kernels import merge_kernel, prefill_kernel, split_kernel
from offload_runtime_kernels.attention_state import AttentionParams, AttentionState, QueryRows
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

TILE_TOKENS = 64
SPLIT_TOKENS = BLOCK_TOKENS
# Few rows per program for windows (the smallest that the matrix units take), many for prompts.
_WINDOW_ROWS = 16
_PREFILL_ROWS = 128
# Full programs that do all splits of their queries, from which on they replace those for every split: a quarter of
# what a large card runs at once, as they reach 366 TFLOP/s on an H200 where those reach 75.
_LEAST_PREFILL_PROGRAMS = 32
# Most workspace for partial results of splits; what would take more is done in parts.
WORKSPACE_BYTES = 64 << 20
# Splits of one launch at least, before queries are done in parts as well: enough programs to fill a GPU.
LEAST_SPLITS = 16
# Results of splits that a merge has on their way.
_MERGE_STAGES = 12


def _parts(whole: range, step: int) -> Iterator[range]:
    """`whole` in consecutive ranges of at most `step`; one empty range if it is empty."""
    for start in range(whole.start, max(whole.stop, whole.start + 1), step):
        yield range(start, min(start + step, max(whole.stop, start)))


def _merge(
    partial: AttentionState, state: AttentionState, out: torch.Tensor, queries: range, params: AttentionParams, *,
    num_splits: int, carried: bool, finish: bool,
) -> None:  # fmt: skip
    """Enqueue the merge of `num_splits` splits of `queries`.

    Args:
        partial: What the splits found, [splits, B * queries, H] and, of `acc`, D more.
        state: Of all queries; read if `carried`, written unless `finish`.
        out: [B, T, H, D], written if `finish`; otherwise only its dtype counts.
        queries: Those of the T queries that are merged.
        params: The layer's.
        num_splits: How many.
        carried: Begin with the state; otherwise with nothing seen.
        finish: Write `out`; otherwise the state.
    """
    batch, num_queries, num_heads, head_dim = out.shape
    num_rows = batch * len(queries)
    merge_kernel[(num_rows, num_heads)](
        partial.best, partial.total, partial.acc, state.best, state.total, state.acc, out,
        params.sinks, num_splits, num_rows, num_queries, queries.start, queries.stop, int(carried), int(finish),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, D_BLOCK=triton.next_power_of_2(head_dim), STAGES=_MERGE_STAGES,
        num_warps=1, **overlap_options(out.device),
    )  # fmt: skip


@dataclass(frozen=True)
class _Call:
    """What the launches of one call share."""

    q: torch.Tensor
    kv: KVBlocks
    rows: QueryRows
    params: AttentionParams
    from_window: bool = False  # splits are counted from the first one on that a query's window reaches
    workspace_bytes: int = WORKSPACE_BYTES
    least_splits: int = LEAST_SPLITS

    def __post_init__(self) -> None:
        data = self.kv.data
        assert all(stride % 16 == 0 for stride in data.stride()[:3]) and data.data_ptr() % 16 == 0

    @property
    def _shape(self) -> dict[str, int | bool]:
        """What all programs are compiled with follows from heads and dtype alone, so that the bits do not depend on the
        pass; it fits 99 KB of shared memory."""
        head_dim, num_kv_heads = self.q.shape[3], self.kv.num_kv_heads
        channels = max(16, triton.next_power_of_2(head_dim))
        return {
            "NUM_KV_HEADS": num_kv_heads, "GROUP": self.q.shape[2] // num_kv_heads, "HEAD_DIM": head_dim,
            "D_BLOCK": channels, "TILE": TILE_TOKENS if self._row_bytes <= 512 else 32, "SPLIT": SPLIT_TOKENS,
            "WINDOWED": self.params.window is not None,
        }  # fmt: skip

    @property
    def _row_bytes(self) -> int:
        return max(16, triton.next_power_of_2(self.q.shape[3])) * self.q.element_size()

    @property
    def _window_rows(self) -> int:
        """A program for windows has so many rows, the heads of a query together."""
        return max(_WINDOW_ROWS, triton.next_power_of_2(self.q.shape[2] // self.kv.num_kv_heads))

    @property
    def _tree_splits(self) -> int:
        """Splits of a sequence, from the one on where its committed tokens end, that may hold keys of its tree."""
        ancestors = self.rows.ancestors
        return 0 if ancestors is None else 1 + triton.cdiv(ancestors.shape[2], SPLIT_TOKENS)

    def run_splits(
        self, partial: AttentionState, queries: range, splits: range, *, tree: bool, final: torch.Tensor | None
    ) -> None:
        """Enqueue one launch on the current stream: each split's own result.

        Args:
            partial: [splits, B * queries, H] and, of `acc`, D more.
            queries: Those of the T queries that attend.
            splits: Of the keys.
            tree: Those of them that may hold keys of a tree, query by query; otherwise all others.
            final: [B, T, H, D], written instead of `partial` when there is one split and no other.
        """
        batch, num_queries, num_heads, _ = self.q.shape
        rows, num_kv_heads = self.rows, self.kv.num_kv_heads
        programs, depth = len(queries), self._tree_splits
        if not tree:
            programs = triton.cdiv(len(queries) * (num_heads // num_kv_heads), self._window_rows)
            # The rows of a program see the first of their windows' keys in two splits, and of trees in more.
            begins = 1 if rows.ancestors is None else triton.cdiv(num_queries, SPLIT_TOKENS)
            depth = len(splits) + self.from_window * begins
        split_kernel[(programs, batch * num_kv_heads, depth)](
            self.q, self.kv.data, partial.best, partial.total, partial.acc, self.q if final is None else final,
            rows.positions, rows.slots,
            rows.slots if rows.committed is None else rows.committed,
            rows.slots if rows.ancestors is None else rows.ancestors,
            num_queries, queries.start, queries.stop, batch * len(queries), splits.start, splits.stop,
            self._tree_splits, 0 if rows.ancestors is None else rows.ancestors.shape[2], self.params.window or 0,
            int(self.from_window), int(final is not None), *self.params.log2_scales, self.params.sinks,
            self.kv.first_block, self.kv.num_blocks, *self.kv.data.stride()[:3], **self._shape, ROWS=self._window_rows,
            TREE=tree, STAGES=1 if self._row_bytes >= 512 else 2, num_warps=4, **overlap_options(self.q.device),
        )  # fmt: skip

    @property
    def _prefill_rows(self) -> int:
        """A program that does all splits has so many rows: what is seen of a row lies in its registers twice."""
        most = 0 if self.q.itemsize == 4 else _PREFILL_ROWS // max(1, self._row_bytes // 256)
        return max(most, self._window_rows)

    def fills_programs(self) -> bool:
        """Whether there are enough queries for programs that do all splits of a full tile of them."""
        batch, num_queries, num_heads, _ = self.q.shape
        num_kv_heads = self.kv.num_kv_heads
        tiles = num_queries * (num_heads // num_kv_heads) // self._prefill_rows
        return self.rows.ancestors is None and batch * num_kv_heads * tiles >= _LEAST_PREFILL_PROGRAMS

    def run_prefill(self, out: torch.Tensor) -> None:
        """Enqueue the launch that does everything at once, into `out` [B, T, H, D]."""
        batch, num_queries, num_heads, _ = self.q.shape
        num_kv_heads = self.kv.num_kv_heads
        programs = triton.cdiv(num_queries * (num_heads // num_kv_heads), self._prefill_rows)
        stages = 1 if self._row_bytes >= 512 else 3 if is_roomy(self.q.device) else 2
        prefill_kernel[(programs, batch * num_kv_heads)](
            self.q, self.kv.data, out, self.rows.positions, self.rows.slots, num_queries,
            self.params.window or 0, *self.params.log2_scales, self.params.sinks, self.kv.first_block,
            self.kv.num_blocks, *self.kv.data.stride()[:3], **self._shape,
            ROWS=self._prefill_rows, STAGES=stages, num_warps=8,
        )  # fmt: skip

    def attend(self, blocks: range, state: AttentionState | None, out: torch.Tensor | None) -> None:
        """Merge `blocks` into `state`, or, without one, into nothing and write `out`."""
        batch, num_queries, num_heads, head_dim = self.q.shape
        split_bytes = batch * num_heads * (head_dim + 2) * 4  # of one split's result for a query of every sequence
        most_queries = max(1, self.workspace_bytes // (split_bytes * min(max(1, len(blocks)), self.least_splits)))
        for queries in _parts(range(num_queries), most_queries):
            most_splits = max(1, self.workspace_bytes // (split_bytes * len(queries)))
            rows = (min(max(1, len(blocks)), most_splits), batch * len(queries), num_heads)
            best, total = torch.empty((2, *rows), dtype=torch.float32, device=self.q.device)
            partial = AttentionState(best, total, best.new_empty(*rows, head_dim))
            if state is None:  # partial results stand for a state that is never touched
                between = AttentionState.empty(self.q) if len(blocks) > most_splits else partial
            else:
                between = state
            if state is None and len(blocks) == 1:
                self._partials(partial, queries, blocks, final=out)
                continue
            for splits in _parts(blocks, most_splits):
                self._partials(partial, queries, splits)
                _merge(
                    partial, between, self.q if out is None else out, queries, self.params, num_splits=len(splits),
                    carried=state is not None or splits.start > blocks.start,
                    finish=out is not None and splits.stop == blocks.stop,
                )  # fmt: skip

    def _partials(
        self, partial: AttentionState, queries: range, splits: range, *, final: torch.Tensor | None = None
    ) -> None:
        """Each split's own result."""
        # Where nobody sees more than one split all trees begin there, and no others are left.
        if self.rows.ancestors is None or self.rows.max_length > SPLIT_TOKENS:
            self.run_splits(partial, queries, splits, tree=False, final=final)
        if self.rows.ancestors is not None:
            self.run_splits(partial, queries, splits, tree=True, final=final)


def attention_triton(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, params: AttentionParams, *, prefill: bool | None = None,
    workspace_bytes: int = WORKSPACE_BYTES, least_splits: int = LEAST_SPLITS,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `attention`; results of splits take `workspace_bytes` at most, unless one does for a query.

    `prefill` says whether one program does all splits of its queries, which changes no bit; None: if queries fill
    enough such programs.
    """
    splits = triton.cdiv(rows.max_length, SPLIT_TOKENS)
    reached = splits if params.window is None else triton.cdiv(params.window - 1, SPLIT_TOKENS) + 1  # by a query
    call = _Call(q, kv, rows, params, reached < splits, workspace_bytes, least_splits)
    out = torch.empty_like(q)
    if call.fills_programs() if prefill is None else prefill:
        assert rows.ancestors is None
        call.run_prefill(out)
    else:
        call.attend(range(min(splits, reached)), None, out)
    return out


def attend_blocks_triton(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, blocks: range, state: AttentionState, params: AttentionParams
) -> None:
    """Triton version of `attend_blocks`."""
    assert state.best.is_contiguous() and state.acc.is_contiguous() and state.acc.shape == q.shape
    seen = range(blocks.start, min(blocks.stop, triton.cdiv(rows.max_length, SPLIT_TOKENS)))
    if seen:
        _Call(q, kv, rows, params).attend(seen, state, None)


def finish_attention_triton(q: torch.Tensor, state: AttentionState, params: AttentionParams) -> torch.Tensor:
    """Triton version of `finish_attention`."""
    out = torch.empty_like(q)
    # No splits: what stands for their results is never read.
    _merge(state, state, out, range(q.shape[1]), params, num_splits=0, carried=True, finish=True)
    return out
