"""The plans in the documentation are those that the planner makes today."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import plan_table
import pytest
import torch
from gguf_mix import stored_kinds

from offload_runtime.weights import describe_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_documented_plans_are_current(tmp_path: Path) -> None:
    plan_table.main(["--out", str(tmp_path / "plans.md")])
    made = (tmp_path / "plans.md").read_text()
    rows = (
        2 * len(plan_table.SHORT_ROWS)
        + len(plan_table.QUANTISED_ROWS)
        + 2 * len(plan_table.ROWS) * len(plan_table.CONTEXTS)
    )
    assert made.count("\n| Llama") + made.count("\n| Qwen") == rows
    assert made.count(" | 2 | ") == len(plan_table.SHORT_ROWS) and "not built" not in made
    documented = (ROOT / "docs" / "plans.md").read_text()
    assert made == documented, "plans have changed: run `python tools/plan_table.py --out docs/plans.md`"


# GB of files that are published, with a tokenizer of some megabytes.
@pytest.mark.parametrize(
    ("folder", "mix", "file_gb"),
    [
        ("llama-3.1-8b", "Q4_K_M", 4.920), ("llama-3.1-70b", "Q4_K_M", 42.520), ("qwen2.5-32b", "Q4_K_M", 19.851),
        ("llama-2-13b", "Q4_K_M", 7.866), ("llama-3.2-1b", "Q4_K_M", 0.808), ("llama-3.1-70b", "Q8_0", 74.975),
        ("qwen2.5-32b", "Q8_0", 34.821), ("qwen2.5-0.5b", "Q8_0", 0.531),
    ],
)  # fmt: skip
def test_mixes_are_as_large_as_published_files(folder: str, mix: str, file_gb: float) -> None:
    model = describe_model(plan_table.CONFIGS / folder)
    layout = replace(model, kinds=stored_kinds(model.config(), mix)).layout(torch.bfloat16)
    assert 0 <= file_gb - layout.total_bytes / 1e9 < 0.012
