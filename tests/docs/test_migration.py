"""Both loops of docs/migration.md run, and end at the same accuracy."""

from __future__ import annotations

import re
import statistics
import warnings
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
SEEDS = (0, 1, 2)
#: On the means over three seeds, in points of accuracy. Noise is fresh in every run.
#: Over four runs a side had a standard deviation of about 0.5 points, so that the
#: difference of two means has about 0.4.
TOLERANCE = 3.0
#: What either loop must reach at all.
FLOOR = 85.0


def loops() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def trained(source: str, seed: int) -> tuple[float, float]:
    """Test accuracy in per cent, and the epsilon that was printed."""
    torch.manual_seed(seed)
    scope: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns about its own use of torch
        exec(compile(source, str(PAGE), "exec"), scope)
    images, labels = scope["digits"].test[:]
    model = scope["model"].eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    return 100 * float(right), float(scope["epsilon"])


def test_the_page_has_the_two_loops():
    theirs, ours = loops()[:2]
    assert "PrivacyEngine" in theirs and "make_private(" in ours


def test_both_loops_end_at_the_same_accuracy():
    pytest.importorskip(
        "opacus", reason="opacus is not installed: pip install opacus==1.6.0"
    )
    theirs, ours = ([trained(source, seed) for seed in SEEDS] for source in loops()[:2])
    accuracies = [[accuracy for accuracy, _ in runs] for runs in (theirs, ours)]
    means = [statistics.mean(values) for values in accuracies]
    assert min(means) > FLOOR, accuracies
    assert abs(means[0] - means[1]) < TOLERANCE, accuracies
    for _, epsilon in theirs + ours:
        assert epsilon == pytest.approx(3.0, abs=0.03)
