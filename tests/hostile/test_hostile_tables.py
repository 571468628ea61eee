"""Hostile CSV and JSON Lines, to train on and to predict from."""

import gzip
import json
import lzma

import pytest

from tests.hostile.conftest import PRIVACY, TABLE

pytestmark = pytest.mark.hostile

GOOD = b"a,b,y\n" + b"1,u,no\n2,v,yes\n" * 4


@pytest.fixture
def table(refused, tmp_path):
    """Train on a table that must be refused, by name."""

    def call(content, name="table.csv"):
        (tmp_path / name).write_bytes(content)
        (tmp_path / "config.toml").write_text(TABLE.format(source=name))
        message = refused("train", "--config", "config.toml", *PRIVACY)
        assert name in message
        return message

    return call


CSV = {
    "empty": (b"", "no rows"),
    "header alone": (b"a,b,y\n", "no rows"),
    "no line ends": (b"a,b,y", "no rows"),
    "ragged, short": (GOOD + b"1,u\n", "line 10: 2 cells"),
    "ragged, long": (GOOD + b"1,u,no,9\n", "line 10: 4 cells"),
    "a zero byte": (GOOD + b"1,u\x00,no\n", "zero byte"),
    "zero bytes alone": (bytes(5000), "zero byte"),
    "an unbalanced quote": (GOOD + b'1,"u,no\n' + GOOD, "malformed CSV"),
    "quotes within a cell": (GOOD + b'1,"u"x,no\n', "malformed CSV"),
    "a long quoted cell": (GOOD + b'1,"' + b"u" * 200_000 + b'",no\n', "malformed CSV"),
    "a lone carriage return": (GOOD + b"1,u\rv,no\n", "line"),
    "a formula as a number": (GOOD + b"=1+1,u,no\n", "not a number"),
    "a formula as a class": (GOOD + b"1,u,=cmd|'calc'!A0\n", "none of the declared"),
    "a command as a number": (GOOD + b"$(reboot),u,no\n", "not a number"),
    "a number with underscores": (GOOD + b"1_0,u,no\n", "not a number"),
    "digits of another script": (GOOD + "٣,u,no\n".encode(), "not a number"),
    "latin-1 among UTF-8": (GOOD + "é,u,no\n".encode("latin1"), "not UTF-8"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "not UTF-8"),
    "UTF-16 without a mark": (GOOD.decode().encode("utf-16-le"), "zero byte"),
    "a column twice": (b"a,a,b,y\n1,1,u,no\n", "twice"),
    "a column that is missing": (b"a,y\n1,no\n", "no column 'b'"),
    "a class that is not declared": (GOOD + b"1,u,maybe\n", "none of the declared"),
    "an empty number": (GOOD + b",u,no\n", "empty"),
    "a pickle": (b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c", "not UTF-8"),
    "very many columns": (b",".join(map(b"c%d".__mod__, range(99999))), "no column"),
}  # fmt: skip


@pytest.mark.parametrize("case", CSV)
def test_csv(table, case):
    content, words = CSV[case]
    assert words in table(content)


def test_a_message_names_no_cell(table):
    message = table(GOOD + b"my secret,u,no\n")
    assert "line 10" in message and "'a'" in message and "secret" not in message


JSON = {
    "not JSON": b"{'a': 1}\n",
    "cut short": b'{"a": 1, "b": "u", "y": "no"\n',
    "an array": b'[1, "u", "no"]\n',
    "a number": b"3\n",
    "deep": b'{"a":' + b"[" * 100_000 + b"\n",
    "deep and closed": b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}\n",
    "a long integer": b'{"a": ' + b"9" * 5000 + b', "b": "u", "y": "no"}\n',
    "a large integer": b'{"a": ' + b"9" * 4000 + b', "b": "u", "y": "no"}\n',
    "a list for a number": b'{"a": [1], "b": "u", "y": "no"}\n',
    "an object for a number": b'{"a": {"$gt": 0}, "b": "u", "y": "no"}\n',
    "a key twice": b'{"a": 1, "a": 2, "b": "u", "y": "no"}\n',
    "a key missing": b'{"a": 1, "y": "no"}\n',
    "null": b'{"a": null, "b": "u", "y": "no"}\n',
    "a surrogate": b'{"a": "\\ud800", "b": "u", "y": "no"}\n',
    "a zero byte": b'{"a": 1, "b": "u", "y": "no\x00"}\n',
}


@pytest.mark.parametrize("case", JSON)
def test_json_lines(table, case):
    good = b'{"a": 1, "b": "u", "y": "no"}\n'
    assert "line 3" in table(good * 2 + JSON[case], "table.jsonl") or "zero" in case


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_packed_tables(table, suffix):
    pack = {"gz": gzip.compress, "xz": lzma.compress}[suffix]
    whole = pack(GOOD)
    for content in (
        GOOD,
        whole[: len(whole) // 2],
        whole[:7],
        b"",
        pack(GOOD + b"1\n"),
    ):
        table(content, f"table.csv.{suffix}")


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_a_packed_bomb(table, suffix, monkeypatch):
    pack = {"gz": gzip.compress, "xz": lzma.compress}[suffix]
    monkeypatch.setattr("curvedp.data.files.HARMLESS_BYTES", 1 << 16)
    bomb = pack(GOOD + b"1,u,no\n" * 100_000)
    message = table(bomb, f"table.csv.{suffix}")
    assert "256 times its size" in message and "unpack it first" in message


def test_a_long_line(table, monkeypatch):
    monkeypatch.setattr("curvedp.data.files.MAX_LINE_CHARACTERS", 1 << 16)
    assert "longer than" in table(GOOD + b"1" * (1 << 17))


def test_what_is_no_file(refused, tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    (tmp_path / "gone.csv").symlink_to("nowhere")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    (tmp_path / "good.csv").write_bytes(GOOD)
    for name in ("pipe.csv", "loop.csv", "gone.csv", "zero.csv"):
        (tmp_path / "config.toml").write_text(TABLE.format(source=name))
        assert name in refused("train", "--config", "config.toml", *PRIVACY)
        (tmp_path / "config.toml").write_text(TABLE.format(source="good.csv"))
        message = refused(
            "train", "--config", "config.toml", "-D", f"test={name}", *PRIVACY
        )
        assert name in message


@pytest.mark.parametrize("case", [c for c in CSV if c not in (
    "a formula as a class", "a class that is not declared", "a column that is missing",
)])  # fmt: skip
def test_csv_to_predict_from(refused, trained, tmp_path, case):
    (tmp_path / "new.csv").write_bytes(CSV[case][0])
    message = refused("predict", trained, "--input", "new.csv", "--output", "out.csv")
    assert "new.csv" in message


@pytest.mark.slow
@pytest.mark.parametrize("case", JSON)
def test_json_lines_to_predict_from(refused, trained, tmp_path, case):
    (tmp_path / "new.jsonl").write_bytes(JSON[case])
    message = refused("predict", trained, "--input", "new.jsonl", "--output", "out.csv")
    assert "new.jsonl" in message


def test_good_rows_are_still_predicted(trained, tmp_path, monkeypatch):
    """Also without a target, and with columns that nobody declared."""
    from typer.testing import CliRunner

    from curvedp.cli.app import app

    rows = {
        "new.csv": "b,a,other\nu,1,x\nv,5,y\n",
        "new.jsonl": '{"a": 1, "b": "u"}\n{"a": 5, "b": "v"}\n',
    }
    given = []
    for name, text in rows.items():
        (tmp_path / name).write_text(text)
        flags = ["predict", trained, "--input", tmp_path / name, "--json"]
        result = CliRunner().invoke(app, [str(f) for f in flags])
        assert result.exit_code == 0, result.output
        given.append(json.loads(result.stdout)["predictions"])
    assert given[0] == given[1] and len(given[0]) == 2
