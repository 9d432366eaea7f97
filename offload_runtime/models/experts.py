"""Mixtures of experts: a router that chooses some of a layer's gated MLPs for each row, and their weighted sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from offload_runtime_kernels.experts import ExpertShape, combine_experts, expert_rows
from offload_runtime_kernels.experts_cpu import ExpertsLibrary, HostExperts, HostMatrix
from offload_runtime_kernels.experts_decoded import decoding_bytes
from offload_runtime_kernels.router import Scores, choose_experts

from offload_runtime.models.layers import (
    GatedMLP,
    LayerWeights,
    Rows,
    Tensor,
    Weights,
    Work,
    product_operations,
    projections,
)


@dataclass(frozen=True)
class Shared:
    """An MLP that every row has beside those that are chosen for it.

    Attributes:
        name: What checkpoints call it.
        mlp: What it is.
        gated: Whether a sigmoid of a product with the row multiplies its result.
    """

    name: str
    mlp: GatedMLP
    gated: bool = False


@dataclass(frozen=True)
class Experts:
    """Gated MLPs, a few of which each row goes through; their weighted results are added in the order of their numbers.

    Attributes:
        expert: What each of them is.
        num_experts, chosen: How many there are, and how many a row goes through.
        scores: What the router's logits become: a softmax or a sigmoid of all, by which experts are chosen, or a
            softmax of those that are chosen by their logits.
        corrected: Whether experts are chosen by their scores and a learnt bias, which their weights do not have.
        normed: Whether the weights of those that are chosen sum to 1.
        scale: What the weights are multiplied by.
        rounds: Whether weights are rounded to the dtype that the model computes in.
        router_dtype: What the router's logits are computed in; None: in the model's.
        shared: What every row has beside them.
        swiglu: gpt-oss' activation, its alpha and limit, in place of the expert's; then the router has a bias, and so
            have experts, in which gates and ups take turns.
    """

    expert: GatedMLP
    num_experts: int
    chosen: int
    scores: Scores = "softmax"
    corrected: bool = False
    normed: bool = True
    scale: float = 1.0
    rounds: bool = True
    router_dtype: torch.dtype | None = None
    shared: Shared | None = None
    swiglu: tuple[float, float] | None = None

    def work(self, rows: int) -> Work:
        """What is done for `rows`."""
        each = 2 * rows * self.chosen * 3 * self.expert.hidden_size * self.expert.intermediate_size
        rest = product_operations((one for one in self.tensors() if one.expert is None), rows)
        return Work(rest, expert_operations=each)

    @property
    def row_elements(self) -> int:
        """Elements that a row takes on its way: logits, which may be in fp32, numbers of 64 bits and weights of those
        that are chosen, what it is in each of them, and what they and the shared one give."""
        hidden, of_shared = self.expert.hidden_size, self.shared.mlp.row_elements if self.shared else 0
        of_each = 10 + self.expert.row_elements + 2 * hidden
        return 2 * self.num_experts + self.chosen * of_each + 3 * hidden + of_shared

    @property
    def prompt_row_elements(self) -> int:
        """Elements that a GPU's kernels write of a row, where so many go through experts together that what other ways
        take would be too much: logits, numbers and weights, of each expert the product of gate and up and what comes of
        it, and what is normed, summed and shared."""
        hidden, of_shared = self.expert.hidden_size, self.shared.mlp.row_elements if self.shared else 0
        of_each = 10 + self.expert.intermediate_size + hidden
        return 2 * self.num_experts + self.chosen * of_each + 3 * hidden + of_shared

    def scratch_bytes(self, rows: int, element_bytes: int) -> int:
        """Bytes of a GPU's memory where passes of up to so many rows decode experts first, to elements of so many
        bytes; 0 where kernels that decode on the way are faster."""
        return decoding_bytes(self._shape, rows, self.chosen, element_bytes)

    def tensors(self) -> Iterator[Tensor]:
        """`router` [E, H] and its `correction` [E]; of each expert `gate_up` [2I, H], the gate first, and `down`
        [H, I]; of the shared one `shared_gate_up`, `shared_down` and `shared_gate` [1, H]."""
        hidden, inner = self.expert.hidden_size, self.expert.intermediate_size
        if self.swiglu is not None:
            yield from projections("router", {"mlp.router": self.num_experts}, hidden, bias=True)
            for part, size in (("gate_up", 2 * inner), ("down", hidden)):
                yield Tensor(f"{part}_biases", f"mlp.experts.{part}_proj_bias", (self.num_experts, size))
        else:
            yield Tensor("router", "mlp.gate.weight", (self.num_experts, hidden), self.router_dtype)
        if self.corrected:
            yield Tensor("correction", "mlp.gate.e_score_correction_bias", (self.num_experts,), torch.float32)
        for number in range(self.num_experts):
            for one in self.expert.tensors():
                name = one.name.replace("mlp.", f"mlp.experts.{number}.")
                yield one._replace(name=name, expert=number)
        if self.shared is not None:
            for one in self.shared.mlp.tensors():
                name = one.name.replace("mlp.", f"mlp.{self.shared.name}.")
                yield one._replace(packed=f"shared_{one.packed}", name=name)
            if self.shared.gated:
                yield from projections("shared_gate", {f"mlp.{self.shared.name}_gate": 1}, hidden)

    def forward(
        self, x: torch.Tensor, weights: LayerWeights, rows: Rows, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return what comes of rows x [N, H], [N, H]; with a residual stream this, to which it has been added."""
        fills_up = rows.prompt is None and len(x) > 1  # rows may be absent, which ask for no experts
        choices, row_weights = self._choose(x, weights, rows.query.positions.reshape(-1) if fills_up else None)
        matrices, fetch, scratch = weights.experts
        y, biases = x.new_empty(*choices.shape, x.shape[1]), self._biases(weights)
        for buffers in fetch(x, choices, y):
            expert_rows(
                x, choices, matrices["gate_up"], matrices["down"], self._shape, out=y, buffers=buffers, **biases,
                scratch=scratch,
            )  # fmt: skip
        if self.shared is None:
            return combine_experts(y, row_weights, residual=residual)
        inside = weights["shared_gate_up"].linear(x, gated=self.shared.mlp.activation)
        of_shared = weights["shared_down"].linear(inside)
        if self.shared.gated:
            of_shared = of_shared.mul_(torch.sigmoid(weights["shared_gate"].linear(x)))
        out = combine_experts(y, row_weights).add_(of_shared)
        return out if residual is None else residual.add_(out)

    @property
    def _shape(self) -> ExpertShape:
        """What kernels have to know."""
        shape = ExpertShape(self.num_experts, self.expert.hidden_size, self.expert.intermediate_size)
        return shape if self.swiglu is None else replace(shape, alpha=self.swiglu[0], limit=self.swiglu[1])

    def _biases(self, weights: Weights) -> dict[str, torch.Tensor]:
        """Those of all experts."""
        if self.swiglu is None:
            return {}
        return {f"{part}_bias": weights[f"{part}_biases"].dense for part in ("gate_up", "down")}

    def on_cpu(self, library: ExpertsLibrary, places: Mapping[str, HostMatrix], weights: Weights) -> HostExperts:
        """What the CPU computes with, where the matrices of an expert lie at `places` of its bytes."""
        biases = {name: bias.cpu() for name, bias in self._biases(weights).items()}
        return HostExperts(library, self._shape, places["gate_up"], places["down"], **biases)

    def _choose(
        self, x: torch.Tensor, weights: Weights, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each row, [N, k] int64 ascending, of equal ones the first, and their weights, [N, k] fp32;
        none of rows at negative positions."""
        logits = weights["router"].linear(x if self.router_dtype is None else x.to(self.router_dtype))
        return choose_experts(
            logits, self.chosen, scores=self.scores, correction=weights["correction"].dense if self.corrected else None,
            normed=self.normed, scale=self.scale, dtype=x.dtype if self.rounds else None, positions=positions,
        )  # fmt: skip
