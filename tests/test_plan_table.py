"""The plans in the documentation are those that the planner makes today."""

from __future__ import annotations

from pathlib import Path

import plan_table
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_documented_plans_are_current(tmp_path: Path) -> None:
    plan_table.main(["--out", str(tmp_path / "plans.md")])
    made = (tmp_path / "plans.md").read_text()
    rows = 2 * len(plan_table.SHORT_ROWS) + 2 * len(plan_table.ROWS) * len(plan_table.CONTEXTS)
    assert made.count("\n| Llama") + made.count("\n| Qwen") == rows
    assert made.count(" | 2, not built | ") == len(plan_table.SHORT_ROWS)
    documented = (ROOT / "docs" / "plans.md").read_text()
    assert made == documented, "plans have changed: run `python tools/plan_table.py --out docs/plans.md`"
