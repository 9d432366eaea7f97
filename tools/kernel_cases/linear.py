"""Matrix products of few and many rows at the shapes of Llama-2-7B and SmolLM2-135M.

The reference is cuBLAS with the kernels that round as the fused ones do. The bound is the longer of reading the weights
once and of multiplying.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from kernel_cases.case import Case, Cases, num_inputs, random_bf16
from offload_runtime_kernels import linear as kernel
from offload_runtime_kernels.linear import Activation, linear_library


@dataclass(frozen=True)
class Product:
    """One matrix product of a model, W [m, k], and what is fused with it."""

    model: str
    name: str
    m: int
    k: int
    gated: Activation | None = None
    residual: bool = False


def layer_products(model: str, hidden: int, qkv: int, inner: int, vocab: int) -> list[Product]:
    """The four products of a layer and the head."""
    return [
        Product(model, "qkv", qkv, hidden), Product(model, "o", hidden, hidden, residual=True),
        Product(model, "gate_up", 2 * inner, hidden, gated="silu"),
        Product(model, "down", hidden, inner, residual=True), Product(model, "head", vocab, hidden),
    ]  # fmt: skip


PRODUCTS = {
    "7b": (layer_products("7b", 4096, 12288, 11008, 32000), (1, 5, 17, 64, 200, 1024)),
    "135m": (layer_products("135m", 576, 960, 1536, 49152), (1, 17)),
}


class Inputs:
    """Random inputs of a product that are taken in turn, more than the caches hold."""

    def __init__(self, product: Product, rows: int) -> None:
        self.product = product
        self.rows = rows
        self.moved_bytes = 2 * product.m * product.k
        self.count = num_inputs(self.moved_bytes)
        self._weight = random_bf16(self.count, product.m, product.k).mul_(product.k**-0.5)
        self._x = random_bf16(rows, product.k)
        self._out = random_bf16(rows, product.m // 2 if product.gated else product.m)

    def linear(self, index: int) -> torch.Tensor:
        """As a pass does it."""
        residual = self._out if self.product.residual else None
        return kernel.linear(self._x, self._weight[index], residual=residual, gated=self.product.gated)

    def library(self, index: int) -> None:
        """cuBLAS and the kernels around it."""
        linear_library(self._x, self._weight[index], self._out, add=self.product.residual, gated=self.product.gated)


def make_case(product: Product, rows: int) -> Case:
    """A product of `rows` rows."""
    inputs = Inputs(product, rows)
    return Case(
        configuration={"model": product.model, "product": product.name, "rows": rows, "m": product.m, "k": product.k},
        kernel=inputs.linear, reference=inputs.library, num_inputs=inputs.count, moved_bytes=inputs.moved_bytes,
        operations=2 * rows * product.m * product.k,
    )  # fmt: skip


CASES: Cases = {
    "linear": [
        partial(make_case, product, rows)
        for products, model_rows in PRODUCTS.values() for rows in model_rows for product in products
    ],
}  # fmt: skip
