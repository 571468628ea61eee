"""Which machine this is."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["PAGE", "ROOT", "processor"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"


def processor():
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
