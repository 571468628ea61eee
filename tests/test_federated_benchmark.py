"""The federated benchmark on a tiny data set: what it runs, keeps and compares."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "federation"


@pytest.fixture(scope="module")
def bench():
    """Names of all its modules."""
    names = ["studies", "records", "training", "page", "federated"]
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(BENCHMARKS))
    found = [importlib.import_module(name) for name in names]
    yield SimpleNamespace(**{k: v for m in found for k, v in vars(m).items()})
    while str(BENCHMARKS) in sys.path:
        sys.path.remove(str(BENCHMARKS))
    for name in names:
        sys.modules.pop(name)
    sys.modules.update(kept)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("plain")
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((10, 64)).astype(np.float32)
    for part, count in (("train", 400), ("test", 200)):
        y = np.arange(count) % 10
        x = centres[y] + 0.3 * rng.standard_normal((count, 64)).astype(np.float32)
        np.savez(made / f"cifar_{part}.npz", x=x, y=y)
        images = (128 + 40 * x[:, :49].reshape(-1, 1, 7, 7)).clip(0, 255)
        images = images.repeat(4, 2).repeat(4, 3).astype(np.uint8)
        np.savez(made / f"fashion_{part}.npz", x=images, y=y)
    return str(made)


def spec(**more):
    return {
        "study": "cifar", "arm": "sofim (paper)", "account": "none",
        "epsilon": math.inf, "split": "iid", "seed": 3, "step": 0.8,
        "settings": {"learning_rate": 0.4, "rho": 0.5, "clip_norm": 2.0}, **more,
    }  # fmt: skip


def test_noise_is_what_the_accounts_take(bench):
    group = spec(account="paper", epsilon=1.0)
    assert bench.noise_for(group, [2500.0] * 20) == pytest.approx(279, rel=5e-3)
    tight = spec(account="tight", epsilon=1.0)
    assert bench.noise_for(tight, [2500.0] * 20) == pytest.approx(31.2, rel=5e-3)
    uneven = bench.noise_for(tight, [500.0] * 10 + [4500.0] * 10)
    assert uneven == pytest.approx(43.9, rel=5e-3)


def test_one_client_with_all_records_is_the_federation(bench, folder):
    how = {"folder": folder, "device": "cpu", "final": True, "rounds": 10}
    together, apart = (bench.run(spec(), **how, apart=a) for a in (False, True))
    assert (together["clients run"], apart["clients run"]) == (1, 20)
    assert together["accuracy"] == pytest.approx(apart["accuracy"], abs=0.011)
    assert together["accuracy"] > 0.8
    assert together["by class"] == pytest.approx(apart["by class"], abs=0.06)


def test_noise_hurts_and_more_of_it_hurts_more(bench, folder):
    how = {"folder": folder, "device": "cpu", "final": True, "rounds": 10}
    clean = bench.run(spec(), **how)["accuracy"]
    noisy = bench.run(spec(account="tight", epsilon=0.5), **how)["accuracy"]
    assert noisy < clean - 0.1  # 400 records


@pytest.mark.parametrize("arm", ["fedgd", "fedkfc"])
def test_clients_with_their_own_sizes_run_apart(bench, folder, arm):
    settings = {"learning_rate": 0.05, "momentum": 0.9}
    if arm == "fedkfc":
        settings |= {"damping": 0.2, "probe_size": 16}
    made = bench.run(
        spec(
            study="fashion", arm=arm, account="tight", epsilon=2.0,
            split="dirichlet, own sizes", settings=settings,
        ),
        folder=folder, device="cpu", final=False, rounds=1,
    )  # fmt: skip
    assert made["clients run"] == 20
    assert 0 <= made["accuracy"] <= 1


def test_every_arm_has_the_same_number_of_trials_and_its_settings_exist(bench):
    for study, expected in (("cifar", 22), ("fashion", 16)):
        for group in bench.groups(study):
            tried = list(bench.trials(group))
            assert len(tried) == (55 if "rho" in group["arm"] else expected)
            assert len({json.dumps(one) for one in tried}) == len(tried)
            bench._recipe({**group, **tried[0]})
    assert len(list(bench.tuning_specs("cifar", 1))) == 11 * (10 * 22 + 55)
    assert len(list(bench.tuning_specs("fashion", 1))) == 96


def test_a_part_of_the_study_can_be_asked_for(bench):
    only = ["account=tight", "epsilon=1", "arm=fedgd", "arm=momentum"]
    specs = bench.tuning_specs("cifar", 1)
    wanted = [s for s in specs if bench.is_wanted(s, only)]
    assert len(wanted) == 2 * 22
    assert {s["epsilon"] for s in wanted} == {1.0}
    assert bench.is_wanted(wanted[0], [])


def test_runs_are_resumed_chosen_and_tabled(bench, folder, tmp_path, capsys):
    out = tmp_path / "tune.jsonl"
    group = {k: spec()[k] for k in ("study", "account", "epsilon", "split")}
    specs = [
        {**group, "arm": arm, "step": step, "seed": 100,
         "settings": {"learning_rate": step, "clip_norm": 2.0}}
        for arm in ("fedgd", "sofim (code)")
        for step in (0.001, 0.5, 4.0)
    ]  # fmt: skip
    how = {"folder": folder, "device": "cpu", "final": False, "rounds": 3}
    bench.run_all(specs[:4], out, "1/1", **how)
    with out.open("a") as file:
        file.write('{"cut off')
    bench.run_all(specs, out, "1/1", **how)
    assert "6 runs, 2 to do" in capsys.readouterr().out
    chosen = bench.choose(bench.read_lines(out))
    assert len(chosen) == 2
    best = chosen[bench.group_of(specs[0])]
    assert best["trials"] == 3
    tried = [x for x in bench.read_lines(out) if x["arm"] == "fedgd"]
    assert best["accuracy"] == max(line["accuracy"] for line in tried)
    finals = [
        {**spec(arm=arm), "seed": seed, **{k: best[k] for k in ("step", "settings")}}
        for arm in ("fedgd",)
        for seed in (0, 1)
    ]
    last = tmp_path / "final.jsonl"
    bench.run_all(finals, last, "1/1", **{**how, "final": True})
    machine = {"torch": "2", "device": "cpu", "date": "today"}
    text = list(bench.page(bench.read_lines(last), chosen, {"cifar": machine}))
    (row,) = (line for line in text if line.startswith("| fedgd | "))
    assert row.endswith("| 2 |")
    assert any("worst class" in line for line in text)
    assert any("| none | inf | iid | fedgd |" in line for line in text)


def test_tuning_never_opens_the_test_file(bench, folder, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    source = Path(folder) / "cifar_train.npz"
    (alone / source.name).write_bytes(source.read_bytes())
    made = bench.run(spec(), folder=str(alone), device="cpu", final=False, rounds=2)
    assert not made["final"]
    with pytest.raises(FileNotFoundError):
        bench.run(spec(), folder=str(alone), device="cpu", final=True, rounds=2)
    assert json.loads(json.dumps(made))["epsilon"] == math.inf
