"""``make trust``: one page of figures about the promises, measured and not asserted.

    python -m tests.trust.page [--short] [--json FILE] [--write docs/results/trust.md]

Mutants and the tests of faults and hostile inputs run beside the rest, in a process of
their own: the page takes two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from . import fuzzing, laws, planting, replaying
from .attacks import ATTACKS
from .mutants import ROOT

#: At most, on two cores.
MINUTES = 20


@dataclass(frozen=True)
class Sizes:
    """How much of each is done; the defaults are the page's."""

    cases: int | None = None
    steps: int = 2
    sums: int = 2000
    runs: int = 80
    draws: int = 10**8
    sampled_steps: int = 100_000
    planted: int | None = None
    mutants: int = 16
    audited: tuple[str, ...] | None = None
    audit: dict[str, Any] = field(default_factory=dict)
    folders: tuple[str, ...] = ("crash", "hostile", "attacks")


SHORT = Sizes(
    cases=4, steps=1, sums=40, runs=2, draws=10**5, sampled_steps=2000, planted=6,
    mutants=0, audited=("dp-sgd",), audit={"canaries": 100, "runs": 3}, folders=(),
)  # fmt: skip


def _figures(found) -> dict[str, Any]:
    return {"neighbours": found.neighbours, "worst": found.worst, "kinds": found.kinds}


def neighbours(sizes: Sizes) -> dict[str, Any]:
    total = fuzzing.Figures()
    chosen = list(replaying.cases())
    if sizes.cases is not None:
        chosen = chosen[:: len(chosen) // sizes.cases]
    for case in chosen:
        total += replaying.replayed(case, steps=sizes.steps)
    recipes = replaying.PRIVATE if sizes.cases is None else ["dp-sgd"]
    for recipe in recipes:
        total += replaying.through_the_trainer(recipe, limit=1)
    return {**_figures(total), "runs": len(chosen), "recipes": len(replaying.PRIVATE)}


def fuzz(sizes: Sizes) -> dict[str, Any]:
    sums, _ = fuzzing.fuzz_sums(sizes.sums)
    runs, _ = fuzzing.fuzz_runs(sizes.runs)
    return _figures(sums + runs)


def planted_bugs(sizes: Sizes) -> dict[str, Any]:
    return planting.planted_bugs(sizes.planted)


def audits(sizes: Sizes) -> list[dict[str, Any]]:
    from curvedp.auditing import audit_all

    found = []
    for result in audit_all(sizes.audited, **sizes.audit):
        row = result.to_json()
        found.append({k: row[k] for k in row if not isinstance(row[k], list)})
    return found


def noise(sizes: Sizes) -> list[dict[str, Any]]:
    found = [laws.noise_law(source, sizes.draws) for source in ("default", "secure")]
    return [{**law.to_json(), "fits": law.fits} for law in found]


def samplers(sizes: Sizes) -> list[dict[str, Any]]:
    found = [laws.sampler_law(s, sizes.sampled_steps) for s in ("default", "secure")]
    return [{**law.to_json(), "fits": law.fits} for law in found]


# -- what runs beside ------------------------------------------------------------------


class Beside:
    """Mutants and marked tests, in another process."""

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        self._folder, self._sizes = folder, sizes
        commands = []
        for name in sizes.folders:
            where = f"tests/{name}"
            if name == "attacks":
                where = " ".join(f"tests/{place}" for place in ATTACKS.values())
            commands.append(
                f"{sys.executable} -m pytest -p no:xdist -p no:cacheprovider "
                f"-m 'not slow' {where} > {folder}/{name}.txt 2>&1"
            )
        if sizes.mutants:
            commands.append(
                f"{sys.executable} -m tests.trust.mutants --count {sizes.mutants} "
                f"--json {folder}/mutants.json > {folder}/mutants.txt 2>&1"
            )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._running = subprocess.Popen(
            ["sh", "-c", "; ".join(commands) or "true"],
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )

    def stop(self) -> None:
        """End what is still running, if the page is given up."""
        if self._running.poll() is None:
            os.killpg(self._running.pid, signal.SIGTERM)

    def result(self) -> dict[str, Any]:
        self._running.wait()
        found: dict[str, Any] = {}
        for name in self._sizes.folders:
            file = self._folder / f"{name}.txt"
            text = file.read_text() if file.exists() else ""
            counts = dict(map(reversed, re.findall(r"(\d+) (passed|failed)", text)))
            found[name] = {k: int(counts.get(k, 0)) for k in ("passed", "failed")}
        if self._sizes.mutants:
            found["mutants"] = json.loads((self._folder / "mutants.json").read_text())
        return found


# -- the page --------------------------------------------------------------------------


def measured(
    sizes: Sizes, say=lambda text: None, keep=lambda result: None
) -> dict[str, Any]:
    """All figures. ``keep`` gets what there is after each part."""
    started = time.monotonic()
    result: dict[str, Any] = {"date": date.today().isoformat()}
    with tempfile.TemporaryDirectory() as folder:
        beside = Beside(sizes, Path(folder))
        try:
            for part in (neighbours, fuzz, planted_bugs, noise, samplers, audits):
                result[part.__name__] = part(sizes)
                say(f"{time.monotonic() - started:6.0f} s  {part.__name__}")
                keep(result)
            result |= beside.result()
        finally:
            beside.stop()
    result["minutes"] = (time.monotonic() - started) / 60
    return result


def page(result: dict[str, Any]) -> str:
    """The figures as text, which is Markdown too."""
    near, fuzzed, bugs = result["neighbours"], result["fuzz"], result["planted_bugs"]
    lines = [
        "# Trust: the figures",
        "",
        f"Printed by `make trust` on {result['date']}, in {result['minutes']:.1f} "
        "minutes. What each figure is, and what it does not say: "
        "[guarantees](../guarantees.md).",
        "",
        "| what | figure |",
        "|---|---|",
        f"| neighbours replayed | {near['neighbours']} of {near['runs']} runs, "
        f"{near['recipes']} recipes |",
        f"| worst measured / declared sensitivity, replayed | {near['worst']:.7f} |",
        f"| neighbours found by fuzzing | {fuzzed['neighbours']} |",
        f"| worst measured / declared sensitivity, fuzzed | {fuzzed['worst']:.7f} |",
        f"| planted bugs killed | {bugs['killed']} of {bugs['planted']} |",
    ]
    if "mutants" in result:
        own = result["mutants"]
        lines.append(
            f"| mutants killed | {own['killed']} of {own['mutants']} "
            f"({own['too_slow']} too slow to tell), drawn from {own['of']} |"
        )
    words = {
        "crash": "faults survived",
        "hostile": "hostile inputs refused",
        "attacks": f"attacks withstood, of {len(ATTACKS)} kinds",
    }
    for name, what in words.items():
        if name in result:
            passed = result[name]["passed"]
            of = passed + result[name]["failed"]
            lines.append(
                f"| {what} | {f'{passed} of {of}' if of else 'not measured'} |"
            )
    for law in result["noise"]:
        lines.append(
            f"| variance of the {law['source']} noise / declared, {law['draws']:.0e} "
            f"draws, 95 % | {law['variance_low']:.5f} to {law['variance_high']:.5f} |"
        )
        lines.append(
            f"| Kolmogorov-Smirnov, {law['source']} noise | distance {law['ks']:.1e}, "
            f"p = {law['ks_p']:.2f} |"
        )
    for law in result["samplers"]:
        lines.append(
            f"| Poisson draws, {law['source']}, {law['steps']} steps | counts p = "
            f"{law['counts_p']:.2f}; largest z of rates {law['rate_z']:.1f}, pairs "
            f"{law['pair_z']:.1f}, steps {law['step_z']:.1f} |"
        )
    lines += ["", "## Audits", "", *audit_table(result["audits"])]
    return "\n".join(lines) + "\n"


def audit_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "White-box, on the worst case; lower bounds at 95 % confidence.",
        "",
        "| recipe | claimed epsilon | lower bound | share | steps | runs x canaries |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        settings = f"{row['steps']} | {row['runs']} x {row['canaries']}"
        lines.append(
            f"| {row['recipe']} | {row['epsilon_claimed']:.3f} | "
            f"{row['epsilon_lower']:.3f} | {row['share_of_claim']:.0%} | {settings} |"
        )
    return lines


def verdict(result: dict[str, Any]) -> list[str]:
    """What is not as it must be; nothing, if all is well."""
    wrong = []
    for name in ("neighbours", "fuzz"):
        if result[name]["worst"] > replaying.LIMIT:
            wrong.append(f"{name}: one example moves a sum by {result[name]['worst']}")
    wrong += [f"not killed: {rule}" for rule in result["planted_bugs"]["alive"]]
    for law in (*result["noise"], *result["samplers"]):
        if not law["fits"]:
            wrong.append(f"another law: {law}")
    for row in result["audits"]:
        if row["epsilon_lower"] > row["epsilon_claimed"]:
            wrong.append(f"{row['recipe']}: the audit's bound is above the claim")
    for name in ("crash", "hostile", "attacks"):
        if result.get(name, {}).get("failed"):
            wrong.append(f"tests/{name}: {result[name]['failed']} failed")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--mutants", type=int, default=Sizes.mutants)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    sizes = SHORT if given.short else Sizes(mutants=given.mutants)

    def keep(result: dict[str, Any]) -> None:
        if given.json:
            given.json.write_text(json.dumps(result, indent=1) + "\n")

    result = measured(
        sizes, lambda text: print(text, file=sys.stderr, flush=True), keep
    )
    keep(result)
    text = page(result)
    print(text)
    if given.write:
        given.write.write_text(text)
    wrong = verdict(result)
    print("\n".join(wrong) or "all as promised", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
