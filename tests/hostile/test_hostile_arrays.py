"""Hostile IDX, CIFAR, image and numpy files."""

import gzip
import io
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest

pytestmark = pytest.mark.hostile


class Trap:
    """A pickle that makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def idx(shape, content, kind=8):
    return struct.pack(">BBBB", 0, 0, kind, len(shape)) + struct.pack(
        f">{len(shape)}I", *shape
    ) + content  # fmt: skip


GOOD_IMAGES = idx((4, 2, 2), bytes(16))
GOOD_LABELS = idx((4,), bytes(4))
LOUD = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (b"", GOOD_LABELS, "truncated"),
        (b"\x00\x00", GOOD_LABELS, "truncated"),
        (b"PK\x03\x04" + GOOD_IMAGES, GOOD_LABELS, "bad magic number"),
        (idx((4, 2, 2), bytes(16), kind=0x0D), GOOD_LABELS, "bad magic number"),
        (GOOD_LABELS, GOOD_LABELS, "bad magic number"),
        (GOOD_IMAGES[:10], GOOD_LABELS, "truncated"),
        (GOOD_IMAGES[:-1], GOOD_LABELS, "truncated"),
        (GOOD_IMAGES + b"\n", GOOD_LABELS, "longer than its header says"),
        (idx((LOUD, LOUD, LOUD), bytes(16)), GOOD_LABELS, "more than the file holds"),
        (idx((LOUD, 1, 1), bytes(16)), GOOD_LABELS, "more than the file holds"),
        (idx((4, 0, 0), b""), GOOD_LABELS, "empty"),
        (idx((LOUD, 0, LOUD), b""), GOOD_LABELS, "empty"),
        (idx((0, 2, 2), b""), idx((0,), b""), "no examples"),
        (GOOD_IMAGES, idx((3,), bytes(3)), "different numbers"),
        (GOOD_IMAGES, idx((4,), b"\x00\x01\x02\xff"), "label of example 3"),
    ],
)  # fmt: skip
def test_idx(refused, tmp_path, images, labels, words):
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte").write_bytes(images)
    (folder / "train-labels-idx1-ubyte").write_bytes(labels)
    assert words in refused.train(folder)


PACKED = gzip.compress(GOOD_IMAGES, mtime=0)


@pytest.mark.parametrize(
    "content",
    [
        GOOD_IMAGES, PACKED[:-9], PACKED[:5], PACKED + b"junk", b"",
        PACKED[:12] + b"\xff" + PACKED[13:],
        gzip.compress(idx((LOUD, LOUD, 9), bytes(100)), mtime=0),
        gzip.compress(GOOD_IMAGES + bytes(1 << 22), mtime=0),
    ],
)  # fmt: skip
def test_packed_idx(refused, tmp_path, content):
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    (folder / "train-labels-idx1-ubyte").write_bytes(GOOD_LABELS)
    refused.train(folder)


@pytest.mark.parametrize(
    "content", [b"", bytes(3072), bytes(3073 * 2 - 1), b"\x0b" * 3073]
)
def test_cifar(refused, tmp_path, content):
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar" / "data_batch_1.bin").write_bytes(content)
    refused.train(tmp_path / "cifar")


def test_pickled_cifar_is_not_opened(refused, tmp_path, trap):
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar" / "data_batch_1").write_bytes(pickle.dumps(Trap(trap)))
    assert "binary version" in refused.train(tmp_path / "cifar")


@pytest.mark.parametrize(
    "suffix", ["pkl", "pickle", "pt", "pth", "joblib", "npy", "PKL"]
)
def test_pickles_by_name(refused, tmp_path, suffix, trap):
    (tmp_path / f"data.{suffix}").write_bytes(pickle.dumps(Trap(trap)))
    refused.train(tmp_path / f"data.{suffix}", "num_classes=3")


def npy(array=None, header=None, version=(1, 0), content=b"", pickled=False):
    file = io.BytesIO()
    if header is None:
        np.lib.format.write_array(file, array, allow_pickle=pickled)
        return file.getvalue()
    text = header.encode("latin1")
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text + content


def claim(shape, dtype="<f4"):
    return f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n"


X, Y = npy(np.zeros((4, 3), np.float32)), npy(np.zeros(4, np.int64))


def write_npz(path, members, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)


@pytest.mark.parametrize(
    "x",
    [
        b"", b"\x93NUMPY", b"\x93NUMPY\x09\x00", X[:-1], X[:30],
        npy(header="", content=bytes(48)),
        npy(header="not a header\n", content=bytes(48)),
        npy(header="__import__('os').system('true')\n", content=bytes(48)),
        npy(header="(" * 3000 + ")" * 3000 + "\n", content=bytes(48)),
        npy(header="{" + "'a':" * 2000 + "\n", content=bytes(48)),
        npy(header=claim("(4, 3)") + " " * 60000, content=bytes(48)),
        npy(header="x" * 65536 + claim("(4, 3)"), version=(2, 0), content=bytes(48)),
        npy(header=claim("(4, 1000000000000)"), content=bytes(48)),
        npy(header=claim("(4, -3)"), content=bytes(48)),
        npy(header=claim("(-4, -3)"), content=bytes(48)),
        npy(header=claim("(1000000000000000000, 0)"), content=b""),
        npy(header=claim("(4, 0)"), content=b""),
        npy(header=claim("(4, 0, 4611686018427387904)"), content=b""),
        npy(header=claim("(True, 3)"), content=bytes(12)),
        npy(header=claim("(4.0, 3)"), content=bytes(48)),
        npy(header=claim("(" + "1," * 40 + "4, 3)"), content=bytes(48)),
        npy(header=claim("(4, 3)", "<f99"), content=bytes(480)),
        npy(header=claim("(4, 3)", "V0"), content=b""),
        npy(header=claim("(4, 3)", "O"), content=bytes(480)),
        npy(header=claim("(4, 3)", "M8"), content=bytes(480)),
        npy(header=claim("(4, 3)", "<U9"), content=bytes(480)),
        npy(header=claim("(4, 3)", "c8"), content=bytes(480)),
        npy(header=claim("(4, 3)", "<i8"), content=bytes(96)),
    ],
)  # fmt: skip
def test_npz_with_a_hostile_array(refused, tmp_path, x):
    write_npz(tmp_path / "data.npz", [("x.npy", x), ("y.npy", Y)])
    refused.train(tmp_path / "data.npz", "num_classes=3")


def test_npz_with_a_pickle(refused, tmp_path, trap):
    objects = np.array([[Trap(trap)] * 3] * 4, dtype=object)
    content = npy(objects, pickled=True)
    write_npz(tmp_path / "data.npz", [("x.npy", content), ("y.npy", Y)])
    assert "pickles" in refused.train(tmp_path / "data.npz", "num_classes=3")


def test_labels_that_are_pickled_or_huge(refused, tmp_path, trap):
    for y in (
        npy(np.array([Trap(trap)] * 4, dtype=object), pickled=True),
        npy(np.full(4, 2**64 - 1, np.uint64)),
        npy(np.full(4, np.nan)),
        npy(np.array(3)),
        npy(np.zeros((4, 1), np.int64)),
    ):
        write_npz(tmp_path / "data.npz", [("x.npy", X), ("y.npy", y)])
        refused.train(tmp_path / "data.npz", "num_classes=3")


@pytest.mark.parametrize(
    "members",
    [
        [],
        [("x.npy", X)],
        [("../x.npy", X), ("../y.npy", Y)],
        [("/tmp/x.npy", X), ("y.npy", Y)],
        [("x.npy", X), ("x.npy", npy(np.ones((4, 3), np.float32))), ("y.npy", Y)],
        [("x.npy/", b""), ("y.npy", Y)],
        [("nested.zip", b"PK\x05\x06" + bytes(18))],
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_npz_with_hostile_members(refused, tmp_path, members):
    write_npz(tmp_path / "data.npz", members)
    refused.train(tmp_path / "data.npz", "num_classes=3")


def test_a_damaged_archive(refused, tmp_path):
    file = tmp_path / "data.npz"
    write_npz(file, [("x.npy", X), ("y.npy", Y)])
    whole = file.read_bytes()
    for content in (b"", b"PK", whole[:-30], whole[:40], whole[60:], b"MZ" * 500):
        file.write_bytes(content)
        refused.train(file, "num_classes=3")
    flagged = bytearray(whole)  # says that its members are encrypted
    at = whole.index(b"PK\x01\x02")
    flagged[at + 8] |= 1
    flagged[6] |= 1
    file.write_bytes(flagged)
    refused.train(file, "num_classes=3")
    lying = bytearray(whole)  # a member that claims to unpack to 4 GiB
    lying[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFF0)
    file.write_bytes(lying)
    refused.train(file, "num_classes=3")


def test_an_unknown_packing_is_refused(refused, tmp_path):
    write_npz(tmp_path / "data.npz", [("x.npy", X), ("y.npy", Y)])
    content = bytearray((tmp_path / "data.npz").read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at + 10] = content[8] = 99
    (tmp_path / "data.npz").write_bytes(content)
    refused.train(tmp_path / "data.npz", "num_classes=3")


def test_a_zip_bomb_is_refused_before_it_is_unpacked(refused, tmp_path):
    header = npy(header=claim("(20000, 1000)"))
    with zipfile.ZipFile(tmp_path / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w") as member:
            member.write(header)
            for _ in range(80):
                member.write(bytes(1_000_000))
        archive.writestr("y.npy", npy(np.zeros(20000, np.int64)))
    assert os.path.getsize(tmp_path / "data.npz") < 500_000
    message = refused.train(tmp_path / "data.npz", "num_classes=3")
    assert "times its size" in message and "numpy.savez" in message


def png(size):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("L", size).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"GIF89a" + bytes(50), b"%!PS-Adobe-3.0 EPSF-3.0\n(x) run\n",
        png((4, 4))[:40], png((4, 4))[:20] + b"\xff\xff\xff\xff" + png((4, 4))[24:],
        png((20000, 20000)), b"P6 99999999 99999999 255\n",
    ],
)  # fmt: skip
def test_images(refused, tmp_path, content):
    folder = tmp_path / "pictures"
    (folder / "cat").mkdir(parents=True)
    (folder / "cat" / "one.png").write_bytes(content)
    (folder / "dog").mkdir()
    message = refused.train(folder, 'classes=["cat","dog"]', "image_size=4")
    assert "cat: image 1 in the order of names" in message


@pytest.mark.parametrize(
    "name", ["../secrets", "..", ".", "/etc", "cat/../..", "", "a\\0"]
)
def test_classes_cannot_leave_the_folder(refused, tmp_path, name):
    for folder in ("pictures/cat", "secrets"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "one.png").write_bytes(png((4, 4)))
    listed = name.replace("\\0", "\\u0000").replace("\\", "\\")
    option = f'classes=["cat","{listed}"]'
    refused.train(tmp_path / "pictures", option, "image_size=4")
