import io
import zipfile

import numpy as np
import pytest
import torch

from curvedp.data import Range, Task, load
from curvedp.errors import ConfigurationError, DataError

PIXELS = np.array([[0, 51, 255], [102, 0, 5]], dtype=np.uint8)
FLOATS = np.array([[0.5, -3.0], [7.0, 1e-3], [2.0, 2.0]])


def npz(tmp_path, name="data.npz", **arrays):
    path = tmp_path / name
    np.savez_compressed(path, **arrays)
    return path


def test_pixels_are_scaled_by_255(tmp_path):
    source = load(npz(tmp_path, x=PIXELS, y=np.array([1, 0])), num_classes=4)
    assert source.task is Task.CLASSIFICATION
    assert source.num_classes == 4
    assert source.input_shape == (3,)
    assert source.test is None
    assert torch.equal(source.train.inputs, torch.from_numpy(PIXELS).float() / 255)
    assert source.train.targets.tolist() == [1, 0]
    assert source.train.targets.dtype == torch.int64


@pytest.mark.parametrize("kind", ["<f4", ">f8", "<f2"])
def test_floats_are_taken_as_they_are(tmp_path, kind):
    x = np.array([[0.5, np.nan], [np.inf, -2.0]]).astype(kind)
    source = load(npz(tmp_path, x=x, y=np.array([0, 1])), num_classes=2)
    expected = torch.tensor([[0.5, torch.nan], [torch.inf, -2.0]])
    assert torch.equal(source.train.inputs.isnan(), expected.isnan())
    assert torch.equal(source.train.inputs.nan_to_num(), expected.nan_to_num())


def test_train_and_test_in_one_file(tmp_path):
    path = npz(
        tmp_path,
        x_train=FLOATS,
        y_train=np.array([0, 1, 1]),
        x_test=FLOATS[:1],
        y_test=np.array([1]),
    )
    source = load(path, num_classes=2)
    assert source.test is not None
    assert (len(source.train), len(source.test)) == (3, 1)


def test_test_in_another_file(tmp_path):
    train = npz(tmp_path, x=FLOATS, y=np.array([0, 1, 1]))
    held_out = npz(tmp_path, "test.npz", x=FLOATS[1:], y=np.array([1, 0]))
    source = load(train, num_classes=2, test=held_out)
    assert source.test is not None
    assert source.test.targets.tolist() == [1, 0]


def test_regression_with_and_without_a_declared_range(tmp_path):
    y = np.array([0.0, 5.0, 40.0])
    path = npz(tmp_path, x=FLOATS, y=y)
    plain = load(path, task="regression")
    assert plain.train.targets.tolist() == [[0.0], [5.0], [40.0]]
    for declared in (Range(0, 10), {"low": 0, "high": 10}, [0, 10]):
        scaled = load(path, task="regression", target_range=declared)
        assert scaled.train.targets.tolist() == [[-1.0], [0.0], [1.0]]
    assert scaled.num_outputs == 1


def test_multi_label_targets_are_zeros_and_ones(tmp_path):
    y = np.array([[0, 1], [1, 1], [0, 0]])
    source = load(npz(tmp_path, x=FLOATS, y=y), task="multi-label")
    assert source.num_outputs == 2
    assert source.train.targets.tolist() == y.tolist()
    with pytest.raises(DataError, match="neither 0 nor 1"):
        load(npz(tmp_path, x=FLOATS, y=y * 2), task="multi-label")


def test_the_number_of_classes_is_not_guessed(tmp_path):
    path = npz(tmp_path, x=FLOATS, y=np.array([0, 1, 1]))
    with pytest.raises(DataError, match=r"would be a release[\s\S]*num_classes="):
        load(path)
    with pytest.raises(DataError, match="num_classes=None"):
        load(path, task="classification")
    with pytest.raises(DataError, match="num_classes=2"):
        load(path, task="regression", num_classes=2)
    with pytest.raises(ConfigurationError, match="unknown task"):
        load(path, task="ranking")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": FLOATS}, "no array 'y'"),
        ({"y": np.zeros(3, int)}, "no array 'x'"),
        ({"x_train": FLOATS, "y": np.zeros(3, int)}, "no array 'y_train'"),
        ({"x": FLOATS, "y": np.zeros(3, int), "x_test": FLOATS}, "no array 'y_test'"),
        ({"x": FLOATS, "y": np.zeros(2, int)}, "x and y differ in length"),
        ({"x": FLOATS[:, 0], "y": np.zeros(3, int)}, "x has 1 dimension"),
        ({"x": FLOATS.astype(int), "y": np.zeros(3, int)}, "whose range nobody"),
        ({"x": FLOATS, "y": np.array([0, 1, 2])}, "example 2 lies outside"),
        ({"x": FLOATS, "y": np.array([0, -1, 1])}, "example 1 lies outside"),
        ({"x": FLOATS, "y": np.array([0, 1, 2**63], np.uint64)}, "too large"),
        ({"x": FLOATS, "y": np.zeros(3)}, "labels have type float64"),
        ({"x": FLOATS, "y": np.array(["a", "b", "c"])}, "only plain numbers"),
        ({"x": FLOATS.astype(complex), "y": np.zeros(3, int)}, "only plain numbers"),
        ({"x": FLOATS, "y": np.int64(3)}, "no array 'y'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, arrays, message):
    path = npz(tmp_path, **arrays)
    with pytest.raises(DataError, match=message) as caught:
        load(path, num_classes=2)
    assert path.name in str(caught.value)


def test_targets_with_three_dimensions_are_refused(tmp_path):
    path = npz(tmp_path, x=FLOATS, y=np.zeros((3, 1, 1)))
    with pytest.raises(DataError, match="targets have 3 dimensions"):
        load(path, task="regression")


class Trap:
    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_objects_are_refused_unread(tmp_path):
    path = npz(tmp_path, x=FLOATS, y=np.array([Trap()] * 3, dtype=object))
    with pytest.raises(DataError, match="pickles, which run code"):
        load(path, num_classes=2)
    assert not Trap.sprung


def with_header(shape: tuple[int, ...], path, content=b"\x00" * 64):
    buffer = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", buffer.getvalue() + content)
    return path


@pytest.mark.parametrize("shape", [(2**40, 2**20), (10**6, 10**6), (9,)])
def test_a_claim_beyond_the_file_allocates_nothing(tmp_path, shape):
    # 64 bytes are there, and 9 doubles need 72; the header's own bytes are no data.
    path = with_header(shape, tmp_path / "data.npz")
    with pytest.raises(DataError, match="more than the file holds"):
        load(path, num_classes=2)


def test_a_member_that_claims_an_impossible_packing_is_refused(tmp_path):
    path = tmp_path / "data.npz"
    buffer = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
    np.lib.format.write_array_header_1_0(buffer, header)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", buffer.getvalue())
        # What the archive's directory will say, whatever the member holds.
        archive.infolist()[0].file_size = 10**13
    with pytest.raises(DataError, match="'x' claims more than the file holds"):
        load(path, num_classes=2)


@pytest.mark.parametrize("shape", [(-1,), (-2, -4), (1,) * 9])
def test_odd_shapes_are_refused(tmp_path, shape):
    path = with_header(shape, tmp_path / "data.npz")
    with pytest.raises(DataError, match=r"dimensions|cannot be read"):
        load(path, num_classes=2)


def test_not_an_archive_or_a_damaged_one(tmp_path):
    path = npz(tmp_path, x=FLOATS, y=np.zeros(3, int))
    whole = path.read_bytes()
    path.write_bytes(b"plainly not a zip")
    with pytest.raises(DataError, match=r"cannot be read as \.npz"):
        load(path, num_classes=2)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cannot be read as \.npz"):
        load(path, num_classes=2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "header", [b"{'descr': (", b"{'descr': '<f8'", b"1L", b'"""', b"{" * 300, b"\x00"]
)
def test_headers_that_are_no_literals_are_refused(tmp_path, header):
    path = tmp_path / "data.npz"
    magic = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", magic + header)
    with pytest.raises(DataError, match="cannot be read"):
        load(path, num_classes=2)


@pytest.mark.parametrize("version", [3, 9])
def test_other_versions_of_the_array_format_are_refused(tmp_path, version):
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY" + bytes((version, 0, 1, 0)))
    with pytest.raises(DataError, match=r"unknown format version|cannot be read"):
        load(path, num_classes=2)


def test_an_unknown_packing_method_is_refused(tmp_path):
    path = npz(tmp_path, x=FLOATS, y=np.zeros(3, int))
    content = bytearray(path.read_bytes())
    for signature, method_offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        content[content.find(signature) + method_offset] = 97
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="cannot be read"):
        load(path, num_classes=2)


@pytest.mark.filterwarnings("ignore")
def test_flipped_bytes_never_give_another_error(tmp_path):
    path = npz(tmp_path, x=FLOATS, y=np.zeros(3, int))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            content[place] = rng.integers(0, 256)
        path.write_bytes(bytes(content))
        try:
            load(path, num_classes=2)
        except DataError:
            refused += 1
    assert refused > 100
