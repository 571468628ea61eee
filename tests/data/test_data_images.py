import builtins
import struct
import zlib

import numpy as np
import pytest
import torch

from curvedp.data import load
from curvedp.errors import ConfigurationError, DataError

Image = pytest.importorskip("PIL.Image", reason="reading images needs pillow")

DECLARED = {"classes": ["cat", "dog"], "image_size": 4}


def picture(path, colour, size=(4, 4), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def colours(dataset):
    return (dataset.inputs[:, :, 0, 0] * 255).round().int().tolist()


@pytest.fixture
def folder(tmp_path):
    picture(tmp_path / "train" / "dog" / "b.png", (0, 255, 0))
    picture(tmp_path / "train" / "dog" / "a.png", (0, 0, 255), size=(9, 6))
    picture(tmp_path / "train" / "cat" / "c.bmp", (255, 0, 51))
    picture(tmp_path / "test" / "dog" / "d.png", 128, mode="L")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    return tmp_path


def test_folders_by_part_and_class(folder):
    source = load(folder, **DECLARED)
    assert (source.num_classes, source.input_shape) == (2, (3, 4, 4))
    assert source.train.targets.tolist() == [0, 1, 1]
    assert colours(source.train) == [[255, 0, 51], [0, 0, 255], [0, 255, 0]]
    assert source.test is not None
    assert source.test.targets.tolist() == [1]
    assert colours(source.test) == [[128, 128, 128]]


def test_without_parts_and_in_grey(folder):
    source = load(folder / "train", classes=["dog", "cat"], image_size=5, channels=1)
    assert source.test is None
    assert source.input_shape == (1, 5, 5)
    assert source.train.targets.tolist() == [0, 0, 1]
    assert torch.allclose(source.train.inputs[1], torch.tensor(150 / 255), atol=1e-6)


def test_height_comes_before_width(tmp_path):
    pixels = np.zeros((2, 6, 3), dtype=np.uint8)
    pixels[:, 3:, 0] = 255
    (tmp_path / "cat").mkdir()
    Image.fromarray(pixels).save(tmp_path / "cat" / "half.png")
    source = load(tmp_path, classes=["cat", "dog"], image_size=[2, 6])
    assert source.input_shape == (3, 2, 6)
    assert source.train.inputs[0, 0].tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    assert source.train.inputs[0, 1:].abs().sum() == 0


def test_a_declared_class_may_have_no_images(folder):
    source = load(folder, classes=["cat", "dog", "owl"], image_size=4)
    assert source.num_classes == 3


@pytest.mark.parametrize("left_out", ["classes", "image_size"])
def test_nothing_is_guessed(folder, left_out):
    declared = {key: value for key, value in DECLARED.items() if key != left_out}
    with pytest.raises(DataError, match="not declared"):
        load(folder, **declared)


def test_declarations_that_do_not_fit_are_refused(folder):
    with pytest.raises(DataError, match=r"none of the declared(?s:.*)declared are cat"):
        load(folder, classes=["cat", "owl"], image_size=4)
    with pytest.raises(DataError, match="listed twice"):
        load(folder, classes=["cat", "cat"], image_size=4)
    with pytest.raises(ConfigurationError, match="channels is 2"):
        load(folder, **DECLARED, channels=2)
    for size in (0, 5000, [4], [4, 4, 4], [4, "a"]):
        with pytest.raises(ConfigurationError, match="image_size is"):
            load(folder, classes=["cat", "dog"], image_size=size)


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(DataError, match="no images in the class folders"):
        load(tmp_path, **DECLARED)


def test_broken_images_are_named(folder):
    path = folder / "train" / "dog" / "b.png"
    whole = path.read_bytes()
    for content in (b"", b"not an image", whole[:40], whole[:-20]):
        path.write_bytes(content)
        with pytest.raises(
            DataError, match=r"dog: image 2 in the order of names: cannot be"
        ):
            load(folder, **DECLARED)


def test_flipped_bytes_never_give_another_error(folder):
    path = folder / "train" / "dog" / "b.png"
    whole = path.read_bytes()
    refused = 0
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 0x55
        path.write_bytes(bytes(content))
        try:
            load(folder, **DECLARED)
        except DataError:
            refused += 1
    assert refused > len(whole) // 2


def test_decoders_that_start_programs_are_not_tried(folder):
    path = folder / "train" / "dog" / "b.png"
    path.write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n"
    )
    with pytest.raises(DataError, match="UnidentifiedImageError"):
        load(folder, **DECLARED)


def test_a_small_file_that_claims_a_huge_image_is_refused(folder):
    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + crc

    # 10^8 pixels: pillow alone would warn and go on.
    header = struct.pack(">IIBBBBB", 10_000, 10_000, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"")
    (folder / "train" / "dog" / "b.png").write_bytes(bomb)
    with pytest.raises(DataError, match="DecompressionBomb"):
        load(folder, **DECLARED)


def test_without_pillow_the_extra_is_named(folder, monkeypatch):
    original = builtins.__import__

    def no_pillow(name, *arguments, **options):
        if name.startswith("PIL"):
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", no_pillow)
    with pytest.raises(ConfigurationError, match=r"curvedp\[images\]"):
        load(folder, **DECLARED)
