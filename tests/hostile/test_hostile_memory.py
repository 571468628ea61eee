"""What a hostile file may cost: memory is measured in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import curvedp

pytestmark = [pytest.mark.hostile, pytest.mark.slow]

PROBE = """
import gzip, lzma, resource, struct, zipfile
from pathlib import Path
from curvedp import data
from curvedp.errors import CurvedpError

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

schema = dict(target="y", classes=["no", "yes"], columns={"a": {"low": 0, "high": 9}})
Path("long.csv").touch()
with open("long.csv", "r+b") as file:
    file.truncate(10**9)  # a line of 1e9 zero bytes, sparse
with gzip.open("long.csv.gz", "wb", 1) as file:
    for _ in range(300):
        file.write(b"7" * 10**6)
with lzma.open("rows.csv.xz", "wb", preset=0) as file:
    file.write(b"a,y\\n")
    for _ in range(300):
        file.write((b"1" + b" " * 999 + b",no\\n") * 1000)
with zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
    for name in ("x.npy", "y.npy"):
        with archive.open(name, "w", force_zip64=True) as member:
            for _ in range(300):
                member.write(bytes(10**6))
Path("mnist").mkdir()
labels = struct.pack(">II", 0x801, 4) + bytes(4)
Path("mnist/train-labels-idx1-ubyte").write_bytes(labels)
with gzip.open("mnist/train-images-idx3-ubyte.gz", "wb", 9) as file:
    file.write(struct.pack(">IIII", 0x803, 300, 1000, 1000))
    for _ in range(300):
        file.write(bytes(10**6))

cases = [("long.csv", schema), ("long.csv.gz", schema), ("rows.csv.xz", schema),
         ("bomb.npz", dict(num_classes=3)), ("mnist", {})]
for name, options in cases:
    before = peak()
    try:
        data.load(name, **options)
    except CurvedpError as error:
        print(f"{name}: {peak() - before:.0f} MiB more, {error.problem}")
        assert peak() - before < 150, name
    else:
        raise AssertionError(f"{name} was not refused")
"""


def test_bombs_of_300_megabytes_cost_little_memory(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(curvedp.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=tmp_path, env=environment, text=True,
        capture_output=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("MiB more") == 5
