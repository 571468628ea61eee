"""Real processes over TLS, with kills: the run is what an unbroken one is."""

import sys
from pathlib import Path

import pytest

from curvedp.experiments.processes import free_port

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_federation_survives_kills(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import federated_processes as kills

    config = kills.config_for("digits", 359.0, 30.0, 1e-4, {"learning_rate": 2.0})
    folder = tmp_path / "run"
    broken = kills.broken_run(folder, config, free_port())
    found = kills.check(folder, config, broken, kills.unbroken_run(config))
    sys.modules.pop("federated_processes")
    assert found["ledger epsilon"] == pytest.approx(found["planned epsilon"])
    assert found["server payments"] == kills.ROUNDS
    assert found["server gapless"]
    assert found["rounds"] == list(range(1, kills.ROUNDS + 1))
    for number, paid in found["client rounds"].items():
        assert found["client payments"][number] == len(paid)  # no round twice
        assert number == 1 or len(paid) == kills.ROUNDS
    assert 2 not in found["client rounds"][1]
    assert len(found["client rounds"][1]) < kills.ROUNDS
    # 360 test records and noise of its own: a point is 3.6 records
    assert found["accuracy"] == pytest.approx(found["unbroken accuracy"], abs=0.08)
