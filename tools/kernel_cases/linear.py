"""Matrix products of few and many rows at the shapes of Llama-2-7B and SmolLM2-135M, and ways to cut them.

The reference is cuBLAS with the kernels that round as the fused ones do. The bound is the longer of reading the weights
once and of multiplying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch
from kernel_cases.case import Case, num_inputs, random_bf16
from offload_runtime_kernels import linear as kernel
from offload_runtime_kernels.linear import LinearTile, linear_library, linear_triton
from timing import graph_times_ms
from triton.runtime.errors import OutOfResources

from offload_runtime.config import GB

_COMPILING_THREADS = 8
_SHOWN = 5


@dataclass(frozen=True)
class Product:
    """One matrix product of a model, W [m, k], and what is fused with it."""

    model: str
    name: str
    m: int
    k: int
    gated: bool = False
    residual: bool = False


def layer_products(model: str, hidden: int, qkv: int, inner: int, vocab: int) -> list[Product]:
    """The four products of a layer and the head."""
    return [
        Product(model, "qkv", qkv, hidden),
        Product(model, "o", hidden, hidden, residual=True),
        Product(model, "gate_up", 2 * inner, hidden, gated=True),
        Product(model, "down", hidden, inner, residual=True),
        Product(model, "head", vocab, hidden),
    ]


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

    def tiled(self, index: int, tile: LinearTile) -> None:
        """The kernel, cut in one way."""
        linear_triton(
            self._x, self._weight[index], self._out, add=self.product.residual, gated=self.product.gated, tile=tile
        )

    def library(self, index: int) -> None:
        """cuBLAS and the kernels around it."""
        linear_library(self._x, self._weight[index], self._out, add=self.product.residual, gated=self.product.gated)

    def time_ms(self, run: Callable[[int], object]) -> float:
        """Median of one `run` in a CUDA graph of at least 16."""
        turn = count()
        return median(graph_times_ms(lambda: run(next(turn) % self.count), calls=max(16, self.count), repeats=5))


def make_case(product: Product, rows: int) -> Case:
    """A product of `rows` rows."""
    inputs = Inputs(product, rows)
    return Case(
        configuration={"model": product.model, "product": product.name, "rows": rows, "m": product.m, "k": product.k},
        kernel=inputs.linear,
        reference=inputs.library,
        num_inputs=inputs.count,
        moved_bytes=inputs.moved_bytes,
        operations=2 * rows * product.m * product.k,
    )


def linear() -> Iterator[Callable[[], Case]]:
    """All cases."""
    for products, model_rows in PRODUCTS.values():
        for rows in model_rows:
            yield from (partial(make_case, product, rows) for product in products)


def tiles(rows: int) -> Iterator[LinearTile]:
    """Ways to cut a product of `rows` rows; some need more shared memory than there is and are left out when tried."""
    few = (
        (16, 128, 1, 4), (16, 128, 1, 6), (16, 256, 1, 4), (32, 128, 2, 4), (64, 64, 4, 6), (64, 128, 4, 4),
        (128, 64, 4, 4),
    )  # fmt: skip
    many = (
        (64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 8, 3), (256, 128, 64, 8, 3),
        (128, 256, 64, 8, 3),
    )  # fmt: skip
    if rows <= 32:
        height = next(height for height in (8, 16, 32) if rows <= height)
        yield from (LinearTile(height, *cut, True) for cut in few)
    else:
        yield from (LinearTile(*cut, w_first) for cut in many for w_first in (True, False))


def tune(product: Product, rows: int, copy_gbps: float) -> dict[str, Any]:
    """Times of every way that runs, best first, as JSON."""
    inputs = Inputs(product, rows)

    def runs(tile: LinearTile) -> bool:
        try:
            inputs.tiled(0, tile)
        except OutOfResources:
            return False
        return True

    ways = list(tiles(rows))
    # Compiling takes longer than timing, and mostly outside of Python.
    with ThreadPoolExecutor(_COMPILING_THREADS) as pool:
        fitting = [tile for tile, fits in zip(ways, pool.map(runs, ways), strict=True) if fits]
    torch.cuda.synchronize()
    times = [(inputs.time_ms(partial(inputs.tiled, tile=tile)), tile) for tile in fitting]
    best = [{**asdict(tile), "ms": time} for time, tile in sorted(times, key=lambda pair: pair[0])[:_SHOWN]]
    return {
        "model": product.model, "product": product.name, "rows": rows, "m": product.m, "k": product.k, "best": best,
        "default_ms": inputs.time_ms(inputs.linear), "library_ms": inputs.time_ms(inputs.library),
        "bound_ms": inputs.moved_bytes / (copy_gbps * GB) * 1e3,
    }  # fmt: skip


def tuned(copy_gbps: float) -> Iterator[dict[str, Any]]:
    """Every product with the best ways to cut it, each printed when it is there."""
    for products, model_rows in PRODUCTS.values():
        for rows in model_rows:
            for product in products:
                result = tune(product, rows, copy_gbps)
                times = ", ".join(f"{key} {value:.4f}" for key, value in result.items() if key.endswith("_ms"))
                print(f"{result['model']} {result['product']}, {rows} rows: {times}")
                for way in result["best"]:
                    cut = ", ".join(
                        f"{way[key]}" for key in ("block_n", "block_m", "block_k", "num_warps", "num_stages", "w_first")
                    )
                    print(f"    ({cut}): {way['ms']:.4f} ms", flush=True)
                yield result
