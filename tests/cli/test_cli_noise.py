"""Correlated noise on the command line: designs, runs, and what was spent."""

import json

import pytest

from curvedp.noise.design import Design, designs_folder
from curvedp.noise.strategies import PrefixSums


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


class TestDesign:
    def test_it_says_what_a_strategy_is_worth(self, call, own_cache):
        asked = ["noise", "design", "--steps", 60, "--bands", 6]
        text = call(*asked, "--parameters", 2**20).stdout
        assert "banded, 6 bands, 60 steps" in text
        assert "5 vectors" in text and "20.0 MiB" in text
        assert "of independent noise of the same sigma" in text
        facts = json.loads(call(*asked, "--json").stdout)
        assert facts["cached"] and facts["bands"] == 6
        assert facts["epsilon"] is None and facts["sigma"] is None
        assert 0.3 < facts["error_by_independent_noise"] < 0.7
        assert facts["largest_column_norm"] <= 1 + 1e-9

    def test_sigma_and_epsilon(self, call, own_cache):
        asked = ["noise", "design", "--steps", 2000, "--strategy", "toeplitz",
                 "--bands", 10, "--sample-rate", 0.01, "--json"]  # fmt: skip
        facts = json.loads(call(*asked, "--epsilon", 5).stdout)
        assert facts["sigma"] == pytest.approx(1.5108, rel=0.005)
        assert facts["sigma_of_independent_noise"] == pytest.approx(0.7556, rel=0.005)
        assert facts["epsilon"] <= 5
        assert (facts["groups"], facts["draws_of_an_example"]) == (10, 200)
        ratio = facts["error_by_independent_noise_at_this_epsilon"]
        assert ratio == pytest.approx(
            facts["error_by_independent_noise"] * facts["sigma"]
            / facts["sigma_of_independent_noise"]
        )  # fmt: skip

    def test_a_picture(self, call, own_cache, tmp_path):
        call("noise", "design", "--steps", 30, "--bands", 3, "--plot", "noise.png")
        assert (tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")

    def test_buffers(self, call, own_cache):
        asked = ["noise", "design", "--steps", 100, "--strategy", "blt", "--bands", 2]
        facts = json.loads(call(*asked, "--sigma", 2, "--json").stdout)
        assert facts["sensitivity"] == pytest.approx(1.0)
        assert facts["epsilon"] == pytest.approx(1.99, abs=0.03)
        again = json.loads(
            call(*asked, "--sigma", 2, "--separation", 25, "--json").stdout
        )
        assert again["sensitivity"] > 2 and again["epsilon"] > facts["epsilon"]
        assert "fixed order" in call(*asked).stdout

    def test_a_design_for_a_spectrum(self, call, own_cache, tmp_path):
        (tmp_path / "spectrum.txt").write_text("1.0\n0.5\n0.1\n-0.2\n")
        asked = ["noise", "design", "--steps", 30, "--bands", 4, "--json"]
        facts = json.loads(
            call(*asked, "--eigenvalues", "spectrum.txt", "--learning-rate", 0.5).stdout
        )
        assert facts["workload"]["kind"] == "noisecurve"
        assert facts["error_by_independent_noise"] < 1

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--bands", "many"], "whole number"),
            ([], "--epsilon and --sample-rate"),
            (["--bands", "3", "--epsilon", "1"], "--sample-rate"),
            (["--bands", "3", "--epsilon", "1", "--sigma", "1"], "one of them"),
            (["--bands", "3", "--strategy", "tree"], "banded, toeplitz, blt"),
            (["--bands", "3", "--eigenvalues", "x"], "belong together"),
            (["--bands", "3", "--eigenvalues", "x", "--learning-rate", "1"],
             "one number a line"),
            (["--bands", "99"], "99 bands"),
            (["--bands", "9", "--sample-rate", "0.5", "--sigma", "1"], "bands"),
            (["--bands", "3", "--sigma", "-1"], "noise_multiplier is -1.0"),
            (["--bands", "3", "--sigma", "nan", "--json"], "noise_multiplier is nan"),
            (["--bands", "3", "--delta", "2"], "delta is 2.0"),
            (["--bands", "3", "--separation", "5"], "leave --separation out"),
            (["--strategy", "blt"], "--bands 4 or so"),
            (["--bands", "3", "--plot", "."], "that path is a folder"),
        ],
    )  # fmt: skip
    def test_refusals(self, call, own_cache, options, said):
        result = call("noise", "design", "--steps", 20, *options, code=2)
        assert said in " ".join(result.stderr.split())


class TestCache:
    DESIGN = Design.of("banded", 20, 3, PrefixSums())

    def test_a_design_is_found_once(self, own_cache, monkeypatch):
        from curvedp.noise import design

        first = self.DESIGN.strategy()
        path = self.DESIGN.path(designs_folder())
        assert path.exists() and path.is_relative_to(own_cache)
        design._strategy.cache_clear()
        monkeypatch.setattr(Design, "find", lambda _: pytest.fail("found again"))
        assert self.DESIGN.strategy().digest() == first.digest()

    @pytest.mark.parametrize("damage", ["cut", "long columns", "other", "pickle"])
    def test_a_file_that_is_wrong_is_not_used(self, own_cache, damage, caplog):
        import numpy as np

        from curvedp.noise import design

        design._strategy.cache_clear()
        first = self.DESIGN.strategy()
        path = self.DESIGN.path(designs_folder())
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:100])
        elif damage == "long columns":  # would let an example do more
            np.savez(path, columns=1.5 * first.arrays()["columns"])
        elif damage == "other":
            np.savez(path, columns=np.ones((1, 20)))
        else:
            np.savez(path, columns=np.array([{"a": 1}], dtype=object))
        design._strategy.cache_clear()
        assert self.DESIGN.strategy().digest() == first.digest()

    def test_a_cache_that_cannot_be_written_is_done_without(
        self, tmp_path, monkeypatch
    ):
        from curvedp.noise import design

        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        design._strategy.cache_clear()
        assert self.DESIGN.strategy().steps == 20


def run_options(blobs):
    return [
        "--data", blobs, "-D", "num_classes=3", "--model", "logreg", "--delta", "1e-3",
        "--batch-size", "30", "--epochs", "4", "--seed", "1", "--device", "cpu",
        "--recipe", "dp-bandmf",
    ]  # fmt: skip


class TestRuns:
    def test_a_run_its_ledger_and_what_it_spent(self, call, blobs):
        asked = ["train", *run_options(blobs), "--epsilon", 4, "--set", "bands=2"]
        dry = json.loads(call(*asked, "--dry-run", "--json").stdout)
        assert dry["noise"]["bands"] == 2
        assert "2 groups in turns" in " ".join(call(*asked, "--dry-run").stdout.split())
        text = call(*asked, "--run-dir", "run").stdout
        assert "cyclic Poisson: 2 secret groups" in " ".join(text.split())
        spent = json.loads(call("privacy", "spent", "run", "--json").stdout)
        assert spent["epsilon"] == pytest.approx(spent["planned_epsilon"], rel=1e-6)
        assert spent["epsilon"] <= 4
        assert spent["facts"]["sampling"] == "cyclic-poisson"
        again = json.loads(call("resume", "run", "--json").stdout)
        assert again["finished"]

    def test_recipes_are_listed(self, call):
        text = call("recipes").stdout
        assert "dp-bandmf" in text and "dp-bandmf+adam" in text
        facts = json.loads(call("recipes", "dp-bandmf", "--json").stdout)
        assert facts["bands"] == "auto" and facts["strategy"] == "banded"

    def test_what_does_not_go_together(self, call, blobs):
        asked = ["train", *run_options(blobs)]
        for options, said in (
            (["--epsilon", 4, "--clipping", "adaptive"], "adaptive clipping"),
            (["--noise-multiplier", 1], "noise_multiplier was given"),
            (["--epsilon", 4, "--secure-noise"], "grid"),
            (["--epsilon", 4, "--set", "strategy=blt"], "no bands"),
        ):
            result = call(*asked, *options, "--run-dir", "run", code=2)
            assert said in " ".join(result.stderr.split())
