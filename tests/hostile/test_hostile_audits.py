"""Audits that ask for absurd numbers: refused before any run is made."""

import pytest

from tests.hostile.conftest import TABLE

pytestmark = pytest.mark.hostile


@pytest.fixture
def audit(refused, tmp_path):
    rows = [f"{k % 7},{'uv'[k % 2]},{['no', 'yes'][k % 2]}" for k in range(40)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    (tmp_path / "config.toml").write_text(TABLE.format(source="table.csv"))
    run = [
        "audit", "--config", "config.toml", "--model", "logreg", "--delta", "1e-3",
        "--noise-multiplier", "2", "--batch-size", "2", "--epochs", "1",
    ]  # fmt: skip
    return lambda *asked: refused(*run, *asked)


@pytest.mark.parametrize(
    "asked",
    [
        ["--canaries", -1], ["--canaries", 0], ["--canaries", 10**9],
        ["--canaries", 10**30], ["--method", "runs", "--runs", -1],
        ["--method", "runs", "--runs", 10**30], ["--confidence", "nan"],
        ["--confidence", "inf"], ["--method", "os:system"], ["--score", "os:system"],
        ["--recipe", "os:system"], ["--plot", "picture.exe"], ["--plot", "a.b/c.ps1"],
    ],
    ids=str,
)  # fmt: skip
def test_numbers_and_names(audit, asked):
    audit(*asked)


def test_a_model_that_tries_an_import(audit, trap):
    assert "'os' is a library" in audit(
        "--model", "os:system", "-M", f"command=touch {trap}"
    )
