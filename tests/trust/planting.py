"""Planted bugs: a guard is taken out, and the check of its rule must fail.

    python -m tests.trust.planting

There is at least one for each rule of the design and for each failure that is known of
other libraries; ``tests/faults`` has them, and runs each as a test.
"""

from __future__ import annotations

import sys
from typing import Any

from ..faults.mutate import planted
from ..faults.test_faults import FAULTS


def planted_bugs(count: int | None = None) -> dict[str, Any]:
    """How many of them are killed; of all, or of some that are spread over all."""
    chosen = FAULTS if count is None else FAULTS[:: len(FAULTS) // count]
    alive = [fault.rule for fault in chosen if not is_killed(fault)]
    return {"planted": len(chosen), "killed": len(chosen) - len(alive), "alive": alive}


def is_killed(fault) -> bool:
    """Whether the check fails with the bug; without it, it has to pass."""
    try:
        with planted(*fault.patches):
            fault.check()
    except AssertionError:
        fault.check()
        return True
    return False


def main() -> None:
    found = planted_bugs()
    for rule in found["alive"]:
        print(f"ALIVE    {rule}")
    print(f"planted bugs killed: {found['killed']} of {found['planted']}")
    sys.exit(bool(found["alive"]))


if __name__ == "__main__":
    main()
