"""Generated faults: small changes of the code that carries the guarantee.

Each mutant changes one thing of one module of ``clipping``, ``noise``, ``sampling`` or
``accounting`` (a comparison, an operator, a number, a condition, a refusal) and is run
against the tests of its package. One that no test notices has *survived*: then a test
is missing, or the change changes nothing, and ``survivors.md`` says which.

    python -m tests.trust.mutants --count 60

A child process is forked for each: what takes long to import is imported once.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("clipping", "noise", "sampling", "accounting")
#: The choice of mutants; another number is another sample.
SEED = 7
#: Tests of a mutant may take this long, in seconds. One that takes longer is counted by
#: itself: it may hang, or the machine may be slow.
LIMIT = 240
#: Tests of modules, where not those of their package.
TESTS = {
    "curvedp.clipping.bounded": [
        "clipping/test_clipping_bounded.py",
        "clipping/test_rounding.py",
    ],
    "curvedp.clipping.rules": ["clipping/test_clipping_bounded.py"],
    "curvedp.clipping.adaptive": ["clipping/test_clipping_adaptive.py"],
    "curvedp.clipping.measured": ["train/test_measured.py"],
    "curvedp.sampling.people": ["train/test_people.py", "sampling"],
    "curvedp.sampling.views": ["train/test_views.py"],
    "curvedp.noise.randomness": ["noise/test_noise_randomness.py", "noise"],
    "curvedp.noise.correlated": ["noise/test_correlated.py"],
    "curvedp.noise.design": ["noise/test_correlated.py", "noise/test_noise_curve.py"],
    "curvedp.sampling.cyclic": ["sampling/test_sampling_cyclic.py"],
    "curvedp.accounting.selection": ["accounting/test_accounting_selection.py"],
    "curvedp.accounting.records": [
        "accounting/test_accounting_ledger.py",
        "accounting/test_accounting_chain.py",
    ],
    "curvedp.accounting.ledger": [
        "accounting/test_accounting_ledger.py",
        "accounting/test_accounting_chain.py",
    ],
}
#: Runs on a GPU alone, and is compared with what runs elsewhere there.
LEFT_OUT = {"graphed"}
#: Words for people: a change of them is not a change of what holds.
_PROSE = {"__repr__", "describe", "__str__", "facts"}

_SWAPS: dict[type, type] = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A place in a module and what is put there.

    Attributes:
        package: whose tests are run.
        module: dotted name.
        line: of the source.
        before: the source there.
        after: what it becomes.
        number: which of the module's mutants.
    """

    package: str
    module: str
    line: int
    before: str
    after: str
    number: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before} -> {self.after}"


def path_of(module: str) -> Path:
    return ROOT / "src" / Path(*module.split(".")).with_suffix(".py")


def modules(package: str) -> list[str]:
    folder = ROOT / "src" / "curvedp" / package
    files = [p for p in folder.rglob("*.py") if p.stem not in {"__init__", *LEFT_OUT}]
    inside = sorted(
        ".".join(p.relative_to(folder).with_suffix("").parts) for p in files
    )
    return [f"curvedp.{package}.{name}" for name in inside]


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Other nodes for this one."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        other = copy.deepcopy(node)
        other.ops[0] = _SWAPS[type(node.ops[0])]()
        yield other
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPS:
        other = copy.deepcopy(node)
        other.op = _SWAPS[type(node.op)]()
        yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        value = node.value
        if isinstance(value, bool):
            yield ast.Constant(not value)
        else:
            yield ast.Constant(value * 2 if value else value + 1)
    elif isinstance(node, ast.If):
        other = copy.deepcopy(node)
        other.test = ast.UnaryOp(ast.Not(), other.test)
        yield other
    elif isinstance(node, ast.Raise):
        yield ast.Pass()


class _Places(ast.NodeTransformer):
    """Walks what computes, counts its changes, and makes one of them."""

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted = wanted
        self.found: list[tuple[int, str, str]] = []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for other in _changes(node):
            if len(self.found) == self.wanted:
                self.found.append((0, "", ""))
                return ast.copy_location(other, node)
            said = (ast.unparse(x).partition("\n")[0][:90] for x in (node, other))
            self.found.append((node.lineno, *said))  # type: ignore[attr-defined]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in _PROSE:
            return node
        node.body = [self.visit(part) for part in node.body]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = ast.unparse(node.func)
        # what an error says, and what a dataclass is
        if name.endswith(("Error", "field", "TypeVar")):
            return node
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.value = self.visit(node.value)
        return node


def all_mutants() -> list[Mutant]:
    found = []
    for package in PACKAGES:
        for module in modules(package):
            places = _Places()
            places.visit(ast.parse(path_of(module).read_text()))
            for number, (line, before, after) in enumerate(places.found):
                found.append(Mutant(package, module, line, before, after, number))
    return found


def sample(count: int, seed: int = SEED) -> list[Mutant]:
    """As many of each package, chosen once and for all."""
    everything, chosen = all_mutants(), []
    for k, package in enumerate(PACKAGES):
        own = [m for m in everything if m.package == package]
        share = count // len(PACKAGES) + (k < count % len(PACKAGES))
        chosen += random.Random(f"{seed} {package}").sample(own, min(share, len(own)))
    return chosen


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with one change."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name, path=None, target=None):
        if name != self.mutant.module:
            return None
        file = str(path_of(name))
        return importlib.machinery.ModuleSpec(name, self, origin=file)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        file = path_of(self.mutant.module)
        tree = _Places(self.mutant.number).visit(ast.parse(file.read_text()))
        module.__file__ = str(file)
        exec(compile(ast.fix_missing_locations(tree), str(file), "exec"), vars(module))


def _child(mutant: Mutant) -> int:
    import pytest

    sys.meta_path.insert(0, _Planted(mutant))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1), os.dup2(silent, 2)
    tests = TESTS.get(mutant.module, [mutant.package])
    return int(
        pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow",
             *(str(ROOT / "tests" / name) for name in tests)]
        )
    )  # fmt: skip


def survives(mutant: Mutant, limit: float = LIMIT) -> bool | None:
    """Whether all tests of its package pass with it; None if they took too long."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _child(mutant)
        finally:
            os._exit(code)
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--package", choices=PACKAGES)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    for name in ("numpy", "pytest", "scipy.stats", "torch"):
        importlib.import_module(name)  # not curvedp: each child has its own change
    chosen = sample(given.count, given.seed)
    if given.package:
        chosen = [m for m in chosen if m.package == given.package]
    survivors, late = [], []
    for mutant in chosen:
        started = time.monotonic()
        alive = survives(mutant)
        survivors += [mutant] if alive else []
        late += [mutant] if alive is None else []
        word = {True: "SURVIVED", False: "killed", None: "too slow"}[alive]
        print(f"{word:8} {time.monotonic() - started:5.1f} s  {mutant}", flush=True)
    killed = len(chosen) - len(survivors) - len(late)
    total = len(all_mutants())
    print(f"mutants killed: {killed} of {len(chosen)}, drawn from {total}")
    print(f"too slow to tell: {len(late)}")
    if given.json:
        result = {"mutants": len(chosen), "killed": killed, "of": total,
                  "seed": given.seed, "too_slow": len(late),
                  "survivors": [asdict(m) for m in survivors]}  # fmt: skip
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
