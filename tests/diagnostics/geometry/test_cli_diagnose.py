"""``curvedp diagnose`` as a person or a script would call it; what is marked how."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from curvedp.cli.app import app
from curvedp.diagnostics.geometry import canvas
from curvedp.diagnostics.geometry.canvas import some_layers

SMALL = [
    "--data", "digits", "--model", "mlp", "-M", "width=8", "-M", "depth=2",
    "--noise-multiplier", "1", "--batch-size", "64", "--epochs", "1", "--seed", "0",
    "--device", "cpu", "--probe-size", "24", "--output", "out",
]  # fmt: skip
FEW = ["--probe-batches", "1"]
NAMES = ("spectra", "alignment", "snr", "density", "clamp")


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, ["diagnose", *map(str, arguments)])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


@pytest.fixture
def titles(monkeypatch):
    """Titles of the plots that are drawn."""
    found = []
    save = canvas.Canvas.save

    def watched(self, path, title, not_private):
        written = save(self, path, title, not_private)
        found.append(self._figure.get_suptitle())
        return written

    monkeypatch.setattr(canvas.Canvas, "save", watched)
    return found


def document(result, tmp_path, name):
    """All of stdout is one JSON document, and it is the one in the folder."""
    printed = json.loads(result.stdout)
    assert printed == json.loads((tmp_path / "out" / f"{name}.json").read_text())
    for plot in printed["plots"]:
        assert (tmp_path / "out" / plot).read_bytes()[:4] == b"\x89PNG"
    assert printed["plots"]
    return printed


def test_help(call):
    text = call("--help").stdout
    assert "NOT PRIVATE" in text
    for name in NAMES:
        assert name in text
        assert "Example" in call(name, "--help").stdout


def test_spectra(call, tmp_path, titles):
    found = document(call("spectra", *SMALL, *FEW, "--json"), tmp_path, "spectra")
    assert found["private"] is False and found["label"] == "not private"
    assert {row["source"]: row["private"] for row in found["rows"]} == {
        "oracle": False, "synthetic": True, "white": True,
    }  # fmt: skip
    assert {row["factor"] for row in found["rows"]} == {"A", "G", "F"}
    assert {row["source"] for row in found["ratios"]} == {"synthetic", "white"}
    assert all(row["private"] is False for row in found["ratios"])
    assert found["run"]["epsilon"] is None  # nothing was trained
    assert len(titles) == 2 and all("NOT PRIVATE" in title for title in titles)


def test_without_the_oracle_nothing_private_is_looked_at(call, tmp_path, titles):
    wanted = ["--sources", "synthetic,white"]
    text = call("spectra", *SMALL, *FEW, *wanted).stdout
    assert "PRIVATE" not in text
    assert not any("PRIVATE" in title for title in titles)
    found = json.loads((tmp_path / "out" / "spectra.json").read_text())
    assert found["private"] is True and found["ratios"] == []
    trained = call("spectra", *SMALL, *FEW, *wanted, "--at", "0,50", "--json",
                   "--unsafe-reproducible-noise", "1")  # fmt: skip
    found = document(trained, tmp_path, "spectra")
    assert found["private"] is False
    assert {(row["step"], row["private"]) for row in found["rows"]} == {
        (0, True), (11, False),
    }  # fmt: skip
    assert "without a guarantee" in found["not_private_because"][0]


def test_alignment(call, tmp_path, titles):
    public = tmp_path / "public.npz"
    rng = np.random.default_rng(0)
    np.savez(
        public,
        x=rng.random((60, 1, 8, 8), dtype=np.float32),
        y=rng.integers(0, 10, 60),
    )
    given = ["--public-data", public, "--public-option", "num_classes=10"]
    result = call("alignment", *SMALL, *FEW, *given, "--at", "0,100", "--json")
    found = document(result, tmp_path, "alignment")
    assert found["private"] is False and "NOT PRIVATE" in titles[0]
    assert all(row["private"] is False for row in found["rows"])
    assert {row["step"] for row in found["rows"]} == {0, 22}
    sources = {"identity", "public", "synthetic", "white"}
    assert {row["source"] for row in found["rows"]} == sources
    assert found["run"]["private"] is True and found["run"]["epsilon"] > 0
    assert found["sources"]["public"]["private"] is True
    for row in found["rows"]:
        assert 0 <= row["cosine"] <= 1 + 1e-9
    text = call("alignment", *SMALL, *FEW, "--at", "0").stdout
    assert "NOT PRIVATE" in text and "0.weight" not in text.split("NOT")[0]


def test_snr(call, tmp_path, titles):
    found = document(call("snr", *SMALL, *FEW, "--json"), tmp_path, "snr")
    assert found["private"] is False and "NOT PRIVATE" in titles[0]
    maps = ["identity", "oracle", "synthetic", "white"]
    assert list(dict.fromkeys(row["whitening"] for row in found["rows"])) == maps
    for row in found["rows"]:
        expected = 1 * 1 * row["parameters"] ** 0.5 / 64
        assert row["noise"] == pytest.approx(expected, rel=1e-6)
        assert row["signal_to_noise"] == pytest.approx(row["signal"] / row["noise"])
    only = call("snr", *SMALL, *FEW, "--sources", "synthetic", "--json")
    rows = document(only, tmp_path, "snr")["rows"]
    assert {row["whitening"] for row in rows} == {"identity", "synthetic"}


def test_density(call, tmp_path, titles):
    few = ["--lanczos-steps", "5", "--vectors", "1"]
    result = call("density", *SMALL, *FEW, *few, "--json")
    found = document(result, tmp_path, "density")
    assert found["private"] is False and "NOT PRIVATE" in titles[0]
    assert {(row["step"], row["source"], row["private"]) for row in found["rows"]} == {
        (step, source, source != "oracle")
        for step in (0, 22)
        for source in ("oracle", "synthetic", "white")
    }
    for row in found["rows"]:
        assert sum(row["weights"]) == pytest.approx(1)


def test_clamp(call, tmp_path, titles):
    result = call("clamp", *SMALL, "--clamps", "fixed,none", "--every", "4", "--json")
    found = document(result, tmp_path, "clamp")
    assert found["private"] is False and "NOT PRIVATE" in titles[0]
    by_name = {row["clamp"]: row for row in found["rows"]}
    assert by_name["fixed"]["steps"] == [0, 4, 8, 12, 16, 20, 22]
    assert by_name["fixed"]["last"] < by_name["fixed"]["first"]
    diverged = by_name["none"]["diverged_at"] is not None
    assert diverged or by_name["none"]["last"] > by_name["none"]["first"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["spectra", "--at", "half"], "not a list of percentages"),
        (["spectra", "--at", "0,150"], "from 0 to 100"),
        (["spectra", "--sources", "pink"], "choose from: oracle"),
        (["alignment", "--sources", "public"], "--public-data"),
        (["snr", "--recipe", "non-private"], "has no noise"),
        (["snr", "--set", "damping=0"], "damping must be a positive number"),
        (["density", "--lanczos-steps", "0"], "no quadrature"),
        (["clamp", "--clamps", "all"], "choose from: scheduled"),
        (["spectra", "--probe-size", "5000"], "ask for fewer"),
    ],
)
def test_refusals_name_the_way_out(call, arguments, words):
    name, *rest = arguments
    result = call(name, *SMALL, *rest, code=2)
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_a_model_without_plots_is_diagnosed_all_the_same(call, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = call("spectra", *SMALL, *FEW)
    assert "curvedp[plots]" in result.stderr
    assert not list((tmp_path / "out").glob("*.png"))
    assert (tmp_path / "out" / "spectra.json").exists()


def test_layers_of_a_deep_model_are_thinned_from_the_first_to_the_last():
    assert some_layers(list("abcdefghi"), 3) == ["a", "e", "i"]
    assert some_layers(["a", "a", "b"], 3) == ["a", "b"]
