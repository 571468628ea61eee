"""``curvedp federated``: views, simulation, keys, and what is refused."""

import json
import subprocess

import numpy as np
import pytest

SMALL = (
    "federated", "simulate", "--clients", "4", "--rounds", "6", "--delta", "1e-4",
    "--epsilon", "8",
)  # fmt: skip


def test_views_by_who_sees_what(call):
    done = call(
        "federated", "views", "--clients", "20", "--rounds", "70", "--epsilon", "1",
        "--relation", "replace-one", "--json",
    )  # fmt: skip
    each, secure, trusted = json.loads(done.stdout)["views"]
    assert each["noise s"] == pytest.approx(279, rel=0.005)
    assert round(secure["noise s"]) == round(trusted["noise s"]) == 62
    assert each["epsilon"] == each["if the server looks"] <= 1
    assert trusted["if the server looks"] > 5
    assert "each-client" in call("federated", "views", "--epsilon", "1").stdout


def test_views_keep_what_the_file_says_of_the_others(call, tmp_path):
    """Who sees each client needs no dropouts; the others lose their noise by them."""
    (tmp_path / "federation.toml").write_text(
        'clients = 20\nrounds = 70\nepsilon = 1.0\nrelation = "replace-one"\n'
        'view = "secure-aggregate"\ndropouts = 3\ncolluding = 1\n'
    )
    ask = ("federated", "views", "federation.toml", "--json")
    each, secure, trusted = json.loads(call(*ask).stdout)["views"]
    assert [row["colluding"] for row in (each, secure, trusted)] == [0, 1, 1]
    assert each["noise s"] == pytest.approx(279.18, rel=0.001)
    assert secure["noise s"] == pytest.approx(62.43 * (20 / 16) ** 0.5, rel=0.001)
    assert trusted["noise s"] == pytest.approx(62.43 * (20 / 19) ** 0.5, rel=0.001)
    _, secure, _ = json.loads(call(*ask, "--colluding", "0").stdout)["views"]
    assert secure["colluding"] == 0  # said here, it counts


def test_simulation(call):
    pytest.importorskip("flwr")
    done = call(*SMALL, "--recipe", "dp-fedsofim", "--json", "--plot", "rounds.png")
    found = json.loads(done.stdout)
    assert [row["round"] for row in found["rounds"]] == list(range(1, 7))
    assert all(row["clients"] == 4 for row in found["rounds"])
    assert found["epsilon"] <= 8
    assert "every client" in found["statement"]["against"]
    with open("rounds.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"


def test_simulation_from_a_file(call, tmp_path):
    pytest.importorskip("flwr")
    (tmp_path / "federation.toml").write_text(
        'recipe = "dp-fedkfc"\nmodel = "mlp"\nsizes = [400, 400, 400]\nrounds = 2\n'
        'epsilon = 8\ndelta = 1e-4\nview = "trusted-aggregate"\n'
        'partition = "dirichlet:1"\n[settings]\nprobe_size = 32\nprobe_batches = 1\n'
    )
    shown = call("federated", "simulate", "federation.toml").stdout
    assert "add-remove" in shown
    assert "the server is trusted" in shown.replace("\n", " ")
    assert "if the server looks" in shown


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--recipe", "dp-sgd"), "dp-fedsofim"),
        (("--view", "secure-aggregate", "--dropouts", "3"), "cannot hide"),
        (("--view", "nobody"), "each-client"),
        (("--partition", "skewed"), "dirichlet"),
        (("--partition", "dirichlet:x"), "dirichlet"),
        (("--relation", "add-remove"), "declare sizes"),
        (("--delta", "0.1"), "delta"),
        (("--epsilon", "0"), "epsilon is 0"),
        (("--epsilon", "inf"), "epsilon is inf"),
        (("--set", "rho=1"), "no setting rho"),
    ],
)
def test_refusals(call, more, words):
    assert words in call(*SMALL, *more, code=2).stderr.replace("\n", " ")


def test_a_config_file_with_an_unknown_setting_is_refused(call, tmp_path):
    (tmp_path / "federation.toml").write_text("round = 3\n")
    done = call("federated", "simulate", "federation.toml", code=2)
    assert "'round'" in done.stderr
    done = call("federated", "simulate", "nowhere.toml", code=2)
    assert "cannot be read" in done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('unit = "person"', "unknown unit 'person'"),
        ("sizes = 400", "declared sizes are 400"),
        ('sizes = ["many"]', "declared sizes are ['many']"),
        ("sizes = [[400]]", "declared sizes are [[400]]"),
        ("settings = 3", "settings of a federation is 3"),
        ("data_options = []", "data_options of a federation is []"),
        ('model_options = "wide"', "model_options of a federation is 'wide'"),
        ("recipe = 3", "recipe of a federation is 3"),
        ("view = []", "view of a federation is []"),
        ('rounds = "many"', "rounds of a federation is 'many'"),
        ("rounds = true", "rounds of a federation is True"),
        ("seed = 0.5", "seed of a federation is 0.5"),
        ('delta = "small"', "delta of a federation is 'small'"),
        ("exact_frames = 1", "exact_frames of a federation is 1"),
        ("seed = -1", "seed of a federation is -1"),
        ("data_options = {day = 2026-01-02}", "no text, number, list or table"),
        ("dropouts = -1", "dropouts is -1"),
    ],
)
def test_a_config_file_with_an_unreadable_value_is_refused(call, tmp_path, line, words):
    (tmp_path / "federation.toml").write_text(f"epsilon = 1.0\n{line}\n")
    done = call("federated", "views", "federation.toml", code=2)
    assert words in done.stderr.replace("\n", " ")


def test_keys_are_made_once_and_fit_together(call, tmp_path):
    pytest.importorskip("cryptography")
    call("federated", "keys", "keys", "--clients", "2", "--host", "server.example.org")
    names = {path.name for path in (tmp_path / "keys").iterdir()}
    assert {"ca.crt", "server.crt", "client-1.key", "client-1.pub"} <= names
    for path in (tmp_path / "keys").glob("*.key"):
        assert path.stat().st_mode & 0o077 == 0  # nobody else may read it
    done = call("federated", "keys", "keys", "--clients", "2", code=2)
    assert "never overwritten" in done.stderr
    try:
        checked = subprocess.run(
            ["openssl", "verify", "-CAfile", "keys/ca.crt", "keys/server.crt"],
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        return
    assert checked.returncode == 0


def test_an_address_that_is_not_this_machines_is_refused_at_once(call, tmp_path):
    (tmp_path / "federation.toml").write_text("sizes = [400]\nepsilon = 1.0\n")
    # 203.0.113.0/24 is nobody's: it is for documentation
    for address in ("203.0.113.7:9800", "nowhere.invalid:9800"):
        done = call(
            "federated", "server", "federation.toml", "--run-dir", "s", "--insecure",
            "--address", address, code=2,
        )  # fmt: skip
        assert "cannot listen on" in done.stderr
        assert "0.0.0.0" in done.stderr
    assert not (tmp_path / "s").exists()


def test_a_clients_own_terms_are_checked_at_once(call, tmp_path):
    (tmp_path / "own.toml").write_text(
        "sizes = [400, 400]\nrounds = 2\nepsilon = 4.0\ndelta = 1e-4\n"
    )
    start = ("federated", "client", "0", "--run-dir", "c", "--insecure")
    limit = ("--max-epsilon", "2")
    done = call(*start, "--config", "own.toml", *limit, code=2)
    assert "limit is 2" in done.stderr.replace("\n", " ")
    assert "delta" in call(*start, *limit, code=2).stderr
    assert "cannot be read" in call(*start, "--config", "none.toml", code=2).stderr


def test_a_deployment_needs_keys_or_says_that_it_has_none(call, tmp_path):
    (tmp_path / "federation.toml").write_text("sizes = [400]\nepsilon = 1.0\n")
    done = call("federated", "server", "federation.toml", "--run-dir", "s", code=2)
    assert "--keys" in done.stderr
    done = call("federated", "client", "0", "--run-dir", "c", code=2)
    assert "--insecure" in done.stderr
    (tmp_path / "federation.toml").write_text("epsilon = 1.0\n")
    done = call("federated", "server", "federation.toml", "--run-dir", "s", code=2)
    assert "sizes of the clients are not declared" in done.stderr


def test_a_config_file_that_is_no_text_is_refused(call, tmp_path):
    (tmp_path / "federation.toml").write_bytes(b'data = "\xff\xfe"\n')
    done = call("federated", "views", "federation.toml", code=2)
    assert "is not TOML" in done.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--clients", "2", "--host", "münchen.example"), "xn--"),
        (("--clients", "0"), "keys for 0 clients"),
    ],
)
def test_keys_that_cannot_be_made_leave_no_folder(call, tmp_path, more, words):
    pytest.importorskip("cryptography")
    assert words in call("federated", "keys", "keys", *more, code=2).stderr
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\tb"])
def test_a_folder_that_flower_would_take_for_another_is_refused(call, tmp_path, name):
    """It reads a path up to the first quotation mark: the ledger would be elsewhere."""
    done = call("federated", "client", "0", "--run-dir", name, "--insecure", code=2)
    assert "Flower cannot be told the path" in done.stderr
    assert not (tmp_path / name).exists()


def test_a_covariance_of_public_data(call, tmp_path):
    pytest.importorskip("flwr")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "other.npz", x=rng.random((64, 1, 8, 8), dtype=np.float32),
             y=rng.integers(0, 10, 64))  # fmt: skip
    (tmp_path / "f.toml").write_text("public_data_options = {num_classes = 10}\n")
    asked = (
        *SMALL[:2],
        "f.toml",
        *SMALL[2:],
        "--recipe",
        "dp-fednew",
        "--set",
        "probe_size=32",
        "--json",
    )
    public = ("--set", "probe=public", "--public-data", "other.npz")
    found = [json.loads(call(*asked, *own).stdout) for own in ((), public)]
    assert [row["round"] for row in found[1]["rounds"]] == list(range(1, 7))
    assert "not protected" in found[1]["statement"]["public data"]
    assert "public data" not in found[0]["statement"]
    refused = call(*asked, "--set", "probe=public", code=2)
    assert "--public-data" in refused.stderr
