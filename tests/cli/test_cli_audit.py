"""``curvedp audit``: what it prints, and the exit code of a broken claim."""

import json

from tests.auditing import planted

RUN = (
    "audit", "--data", "digits", "--model", "logreg", "--epochs", "1",
    "--batch-size", "256", "--canaries", "120", "--seed", "1",
    "--unsafe-reproducible-noise", "1",
)  # fmt: skip


def test_json_and_a_picture(call):
    done = call(*RUN, "--epsilon", "4", "--json", "--plot", "audit.png")
    found = json.loads(done.stdout)
    assert found["holds"] and found["epsilon_lower"] <= found["epsilon_claimed"] <= 4
    assert (found["canaries"], found["steps"], found["method"]) == (120, 5, "one-run")
    with open("audit.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"


def test_a_broken_claim_is_said_and_has_its_exit_code(call, monkeypatch):
    for _ in range(5):  # 32 times too little noise
        planted.halve_the_noise(monkeypatch)
    done = call(*RUN, "--epsilon", "0.5", code=1)
    assert "BROKEN" in done.stdout


def test_refusals(call):
    assert "method" in call(*RUN, "--epsilon", "4", "--method", "x", code=2).stderr
    done = call(*RUN, "--recipe", "non-private", code=2)
    assert "claims no epsilon" in done.stderr
