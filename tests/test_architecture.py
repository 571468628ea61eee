"""The shape of the code: who imports whom, who may make which value."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import curvedp

SOURCE = Path(curvedp.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = sorted(SOURCE.rglob("*.py"))

#: Longer files hold more than one idea.
LONGEST_FILE = 450

#: What a bare GPU machine lacks; see the import contracts in pyproject.toml.
OPTIONAL = [
    "dp_accounting", "typer", "rich", "matplotlib", "safetensors", "PIL", "optuna",
    "flwr",
]  # fmt: skip


def name_of(path):
    return path.relative_to(SOURCE).as_posix()


def calls(tree):
    """Every call in a module with the last part of the called name, and all of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            full = ast.unparse(node.func)
            yield node, full, full.rsplit(".", 1)[-1]


def callers_of(name):
    return {
        name_of(path)
        for path in FILES
        for _, _, last in calls(ast.parse(path.read_text()))
        if last == name
    }


def test_import_contracts_are_kept():
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert command, "import-linter is not installed (pip install 'curvedp[dev]')"
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_noise_makes_a_release():
    callers = callers_of("Release")
    assert callers
    assert all(name.startswith("noise/") for name in callers), callers


def test_only_clipping_makes_a_clipped_sum():
    # merge in the barrier itself, and the suites for authors of mechanisms
    assert callers_of("ClippedSum") == {
        "barrier.py",
        "clipping/bounded.py",
        "testing/conformance.py",
    }


def test_nobody_goes_around_the_constructors():
    # dataclasses.replace makes values too
    wanted = {"release", "clipped", "clipped_sum", "pending", "part", "total"}
    for path in FILES:
        for node, _, last in calls(ast.parse(path.read_text())):
            if last == "replace" and node.args:
                first = ast.unparse(node.args[0]).rsplit(".", 1)[-1]
                assert first not in wanted, f"{name_of(path)}:{node.lineno}"


def test_nothing_in_the_package_imports_its_test_tools():
    for path in FILES:
        if name_of(path).startswith("testing/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("curvedp.testing"), path


#: Seeds the global state for a function of the user's, and puts it back: see
#: tests/train/test_collate.py.
SEEDS_OTHERS = "sampling/alike.py"

#: Functions of torch that draw from the global generator unless they are given one.
TORCH_DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli"}

#: What reads the global state or puts it back, and draws nothing.
KEEPS_STATE = {"getstate", "setstate", "get_state", "set_state"}

#: Functions of numpy.random that only make generators; all others use the global state.
NUMPY_MAKERS = {"Generator", "Philox", "SeedSequence", "RandomState", "default_rng"}


def test_random_numbers_come_from_generators():
    for path in FILES:
        if name_of(path) == SEEDS_OTHERS:
            continue
        for node, full, last in calls(ast.parse(path.read_text())):
            where = f"{name_of(path)}:{node.lineno}: {full}"
            if last in KEEPS_STATE:
                continue
            if full.startswith("torch.") and last in TORCH_DRAWS:
                given = {keyword.arg for keyword in node.keywords}
                assert "generator" in given, f"{where} draws from the global generator"
            if full.startswith(("np.random.", "numpy.random.")):
                # np.random.default_rng(seed).random(...) starts with its maker
                maker = full.split("random.", 1)[1].split("(")[0]
                assert maker in NUMPY_MAKERS, f"{where} uses the global state"
                assert node.args or "(" in full, f"{where} is not seeded"
            if last in {"normal_", "uniform_", "random_"} and "init" not in full:
                given = {keyword.arg for keyword in node.keywords}
                assert "generator" in given, f"{where} draws from the global generator"
            assert not full.startswith("random."), f"{where} uses the global state"


def test_the_entropy_of_the_noise_is_drawn_in_one_place():
    drawn = {
        name_of(path)
        for path in FILES
        for node, full, last in calls(ast.parse(path.read_text()))
        if last == "randbits" and node.args and ast.unparse(node.args[0]) == "256"
    }
    assert drawn == {"noise/randomness.py"}


def test_the_engine_runs_where_optional_packages_are_missing():
    script = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None  # importing it raises ImportError
import torch
import curvedp, curvedp.train
from curvedp.train import make_private
model = torch.nn.Linear(3, 2)
data = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.zeros(20).long())
private = make_private(
    model, torch.optim.SGD(model.parameters(), 0.1), data, loss="cross-entropy",
    noise_multiplier=1.0, delta=1e-5, sample_rate=0.2, steps=2, expected_batch_size=4.0,
)
before = model.weight.detach().clone()
for x, y in private.loader:
    private.loss(private.model(x), y).backward()
    private.optimizer.step()
assert private.step == 2
assert not torch.equal(before, model.weight)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_no_optional_package():
    script = (
        "import sys, curvedp, curvedp.train\n"
        f"print([n for n in {OPTIONAL!r} if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_files_are_short():
    long = {
        name_of(path): count
        for path in FILES
        if (count := len(path.read_text().splitlines())) > LONGEST_FILE
    }
    assert not long


def test_every_file_says_what_it_is_for():
    for path in FILES:
        if path.name != "_version.py":
            assert ast.get_docstring(ast.parse(path.read_text())), name_of(path)


def test_every_public_name_exists():
    for path in FILES:
        tree = ast.parse(path.read_text())
        names = {
            n.id
            for node in ast.walk(tree)
            for n in ast.walk(node)
            if isinstance(n, ast.Name)
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "__all__"
            ):
                public = ast.literal_eval(node.value)
                assert set(public) <= names, name_of(path)
                assert len(set(public)) == len(public), name_of(path)
