"""Files full of a marker, damaged in many ways: nothing that is said holds it."""

import gzip
import io
import itertools
import json
import lzma
import pickle
import struct
import warnings

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from typer.testing import CliRunner

from curvedp.cli.app import app
from curvedp.data import load
from curvedp.errors import CurvedpError
from tests.hostile.conftest import PRIVACY
from tests.hostile.listening import NUMBER, TEXT, assert_silent, said

pytestmark = pytest.mark.hostile

MARK = TEXT.encode()


@pytest.fixture
def silent(tmp_path, capfd):
    """Load a path by Python, and train on it by the command line: no marker is said."""
    refused = []

    def check(path, *, cli=False, **options):
        text, error = said(lambda: load(path, **options), capfd)
        assert_silent(text)
        assert error is None or isinstance(error, CurvedpError), repr(error)
        refused.append(error is not None)
        if not cli:
            return
        config = tmp_path / "config.toml"
        declared = "".join(f"{k} = {toml(v)}\n" for k, v in options.items())
        config.write_text(f"[data]\nsource = {json.dumps(str(path))}\n{declared}")
        run = [*PRIVACY[:-1], str(tmp_path / f"run{len(refused)}")]

        def train():
            result = CliRunner().invoke(app, ["train", "--config", str(config), *run])
            print(result.output)
            if error is not None:
                assert result.exit_code == 2, "not refused"
            if result.exception is not None:
                raise result.exception

        assert_silent(said(train, capfd)[0])

    yield check
    assert refused.count(True) > len(refused) // 3, "hardly anything was refused"


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


COLUMNS = {"a": {"low": 0, "high": 1}, "b": {"categories": ["u", "v"]}}
DECLARED = {"target": "y", "classes": ["no", "yes"], "columns": COLUMNS}
ROW = f"{NUMBER},{TEXT},no\n".encode()
TABLE = b"a,b,y\n" + ROW * 3


def damaged_tables():
    yield "as it is", TABLE
    yield "no header", ROW * 3
    yield "a header of records", f"{NUMBER},{TEXT},{TEXT}\n".encode() + ROW
    yield "another label", TABLE + f"{NUMBER},{TEXT},{TEXT}\n".encode()
    yield "a word for a number", TABLE + f"{TEXT},{TEXT},no\n".encode()
    yield "no number", TABLE + f"{NUMBER}_{NUMBER},{TEXT},no\n".encode()
    yield "other digits", TABLE + "٣zqmarker,u,no\n".encode()
    yield "short", TABLE + f"{NUMBER},{TEXT}\n".encode()
    yield "long", TABLE + ROW[:-1] + MARK + b"," + MARK + b"\n"
    yield "NaN", TABLE + f"nan,{TEXT},{NUMBER}\n".encode()
    yield "latin-1", TABLE + MARK + "é".encode("latin1") + ROW
    yield "UTF-16", TABLE.decode().encode("utf-16")
    yield "a NUL", TABLE + MARK + b"\0" + ROW
    yield "a mark of byte order", b"\xef\xbb\xbf" + TABLE + MARK
    yield "two of them", b"\xef\xbb\xbf\xef\xbb\xbf" + TABLE
    yield "semicolons", TABLE.replace(b",", b";")
    yield "an open quote", TABLE + b'1,"' + ROW * 2
    yield "a quote inside", TABLE + b'1,"' + MARK + b'"' + MARK + b",no\n"
    yield "a long field", TABLE + b'1,"' + MARK * 20_000 + b'",no\n'
    yield "a carriage return", TABLE + MARK + b"\r" + ROW
    yield "cut short", TABLE[:-4]
    for place in range(0, len(TABLE), 7):
        yield f"a flipped bit at {place}", flipped(TABLE, place, 0x41)
        yield f"a marker at {place}", TABLE[:place] + MARK + TABLE[place:]


def flipped(content, place, mask=0xFF):
    return content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]


DECLARATIONS = {
    "fitting": {},
    "of another label": {"target": "b"},
    "of a column that is not there": {"columns": {**COLUMNS, "c": COLUMNS["a"]}},
    "of a word as a number": {"columns": {"b": {"low": 0, "high": 1}}},
    "of a regression": {"classes": None, "target_range": [0, 1]},
    "of labels": {"classes": None, "task": "multi-label", "target": ["b", "y"]},
    "with a header": {"header": ["y", "a", "b"]},
    "with a header of two": {"header": ["a", "y"], "columns": {"a": COLUMNS["a"]}},
    "of another delimiter": {"delimiter": "z"},
    "of comments": {"comment": "9"},
}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz", ".csv.xz"])
def test_tables(silent, tmp_path, suffix):
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(suffix[-3:], bytes)
    path = tmp_path / f"table{suffix}"
    cases = itertools.product(enumerate(damaged_tables()), DECLARATIONS)
    for (number, (name, content)), how in cases:
        declared = {**DECLARED, **DECLARATIONS[how]}
        apart = suffix == ".csv" and " at " not in name and number % 2
        if how == "fitting" or apart:
            path.write_bytes(pack(content))
            options = {k: v for k, v in declared.items() if v is not None}
            told = suffix == ".csv" and how == "fitting" and number % 3 == 1
            silent(path, cli=told and " at " not in name, **options)
    whole = pack(TABLE * 10)
    for cut in range(1, len(whole), 29):
        path.write_bytes(whole[:cut] + MARK)
        silent(path, **DECLARED)
    path.write_bytes(MARK * 20)  # not even packed
    silent(path, cli=True, **DECLARED)


JSON_ROW = {"a": NUMBER, "b": TEXT, "y": "no"}


def damaged_json():
    good = json.dumps(JSON_ROW)
    yield from (good, good[:-1], f'"{TEXT}"', f"[{NUMBER}]", str(NUMBER), TEXT)
    yield json.dumps({**JSON_ROW, "a": TEXT})
    yield json.dumps({**JSON_ROW, "a": [NUMBER]})
    yield json.dumps({**JSON_ROW, "y": TEXT})
    yield json.dumps({**JSON_ROW, "y": {TEXT: NUMBER}})
    yield json.dumps({TEXT: NUMBER, "y": "no"})
    yield good[:-1] + f', "{TEXT}": 1, "{TEXT}": {NUMBER}}}'
    yield good.replace("no", f"\\{TEXT}")
    yield good.replace("no", f"{TEXT}\t\0")
    yield good.replace(f"{NUMBER}", "987654321" * 600)
    yield good.replace(f"{NUMBER}", f"-{TEXT}")
    yield from (good[:k] + TEXT + good[k:] for k in range(0, len(good), 5))


def test_json_lines(silent, tmp_path):
    path = tmp_path / "table.jsonl"
    for number, line in enumerate(damaged_json()):
        path.write_text(json.dumps(JSON_ROW) + "\n" + line + "\n")
        silent(path, cli=number < 16 and number % 3 == 0, **DECLARED)


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path.read_bytes()


MANY = np.full((4, 3), NUMBER)
WORDS = np.array([TEXT] * 4)
STRUCTURED = np.zeros(4, dtype=[(TEXT, "f8"), (f"c{NUMBER:.0f}", "i4")])
LARGE = np.full(4, 987654321)
ARRAYS = (
    {"x": MANY, "y": np.arange(4) % 2},
    {"x": MANY, "y": LARGE},
    {"x": MANY, "y": LARGE.astype(np.uint64) * 987654321 * 10},
    {"x": MANY, "y": MANY},
    {"x": MANY, "y": WORDS},
    {"x": WORDS, "y": LARGE},
    {"x": LARGE[:, None], "y": LARGE},
    {"x": MANY[0], "y": LARGE},
    {"x": MANY, "y": LARGE[:2]},
    {"x": STRUCTURED, "y": LARGE},
    {"x": MANY, "y": STRUCTURED},
    {"x": MANY, "y": np.array([TEXT, NUMBER, None, {TEXT: 1}], dtype=object)},
    {TEXT: MANY, f"c{NUMBER:.0f}": LARGE},
    {"x_train": MANY, "y_train": np.arange(4) % 2, "x_test": MANY, "y_test": LARGE},
    {"x": MANY * 1e290, "y": np.arange(4) % 2},
)


def test_arrays(silent, tmp_path):
    path = tmp_path / "data.npz"
    classes = {"num_classes": 2}
    ranged = {"task": "regression", "target_range": [0, 1]}
    several = {"task": "multi-label"}
    for arrays, declared in itertools.product(ARRAYS, (classes, ranged, several)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's, of a packed structure
            npz(path, **arrays)
        silent(path, cli=declared is classes, **declared)
    whole = npz(path, x=MANY, y=np.arange(4) % 2)
    for place in range(0, len(whole), 17):
        path.write_bytes(flipped(whole, place))
        silent(path, **classes)
        path.write_bytes(whole[:place] + MARK + whole[place + len(MARK) :])
        silent(path, **classes)
        path.write_bytes(whole[:place] + MARK)
        silent(path, **classes)
    for content in (MARK * 9, b"PK\x03\x04" + MARK, pickle.dumps([TEXT, NUMBER])):
        for name in ("data.npz", "data.pkl", "data.bin"):
            (tmp_path / name).write_bytes(content)
            silent(tmp_path / name, cli=True, **classes)


def idx(kind, shape, content):
    head = struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape)
    return head + content


def test_idx_folders(silent, tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    images = folder / "train-images-idx3-ubyte"
    labels = folder / "train-labels-idx1-ubyte"
    good = idx(8, (4, 2, 4), MARK * 4)
    for content in (
        MARK * 5, good, good[:9], good + MARK, idx(13, (4, 2, 4), MARK * 4),
        idx(8, (987654321, 2, 4), MARK), idx(8, (1, 987654321, 0), MARK),
        *(good[:k] + MARK + good[k + len(MARK) :] for k in range(len(good))),
    ):  # fmt: skip
        for answers in (idx(8, (4,), MARK[:4]), idx(8, (3,), bytes(3)), MARK * 2):
            images.write_bytes(content)
            labels.write_bytes(answers)
            silent(folder)
    silent(folder, cli=True)
    images.unlink()
    for content in (MARK, gzip.compress(good)[:-5], b"\x1f\x8b" + MARK):
        (folder / f"{images.name}.gz").write_bytes(content)
        silent(folder, cli=True)


def test_cifar_folders(silent, tmp_path):
    record = b"\x01" + MARK * 384
    for content in (record * 2, b"z" + record[1:], record[:-1], MARK * 9, b""):
        (tmp_path / "data_batch_1.bin").write_bytes(content)
        silent(tmp_path, cli=True)
        (tmp_path / "data_batch_1.bin").unlink()
        (tmp_path / "data_batch_1").write_bytes(content)  # as a pickle is called
        silent(tmp_path)


def png():
    words = PngImagePlugin.PngInfo()
    words.add_text(TEXT, TEXT)
    pixels = np.frombuffer(MARK * 24, np.uint8).reshape(8, 8, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png", pnginfo=words)
    return file.getvalue()


def test_image_folders(silent, tmp_path):
    declared = {"classes": ["cat", "dog"], "image_size": 4}
    folder = tmp_path / "pictures"
    (folder / "cat").mkdir(parents=True)
    (folder / "dog").mkdir()
    path, whole = folder / "cat" / f"{TEXT}.png", png()
    for place in range(0, len(whole), 5):
        for content in (
            whole[:place] + MARK,
            flipped(whole, place),
            whole[:place] + MARK + whole[place + len(MARK) :],
        ):
            path.write_bytes(content)
            silent(folder, **declared)
    for content in (MARK, b"GIF89a" + MARK * 9, b"P6 987654321 987654321 255\n"):
        path.write_bytes(content)
        silent(folder, cli=True, **declared)
    path.write_bytes(whole)
    (folder / f"{TEXT}{NUMBER}").mkdir()
    silent(folder, cli=True, **declared)


def test_inputs_to_predict_from(trained, tmp_path, capfd):
    for name, content in (
        ("t.csv", b"a,b\n" + MARK + b",u\n"),
        ("t.csv", ROW * 2),
        ("t.jsonl", b'{"a": "' + MARK + b'"}\n'),
        ("t.npz", MARK * 3),
        ("t.npz", npz(tmp_path / "a.npz", **{TEXT: MANY})),
        ("t.npz", npz(tmp_path / "b.npz", x=WORDS)),
    ):
        (tmp_path / name).write_bytes(content)
        arguments = ["predict", str(trained), "--input", str(tmp_path / name)]

        def predict(arguments=arguments):
            result = CliRunner().invoke(app, arguments)
            print(result.output)
            assert result.exit_code == 2, "not refused"

        assert_silent(said(predict, capfd)[0])
