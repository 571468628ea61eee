"""Random streams: separate, addressed, and keeping their secret."""

import copy
import pickle

import numpy as np
import pytest
import torch

from curvedp.errors import ConfigurationError, CurvedpError
from curvedp.noise import NoiseState, RandomStreams, Stream

SECRET = 987654321012345678


def first(streams, stream, *address):
    return float(streams.generator(stream, *address).random())


def test_equal_addresses_give_equal_draws_and_others_do_not():
    streams = RandomStreams(1, unsafe_reproducible_noise=2)
    public = [s for s in Stream if s is not Stream.NOISE]
    for stream in public:
        assert first(streams, stream, 3) == first(streams, stream, 3)
    draws = {
        (stream, address): first(streams, stream, *address)
        for stream in Stream
        for address in ((0,), (1,), (0, 0), (0, 1), (1, 0), (2**33,), (2**40, 7))
    }
    assert len(set(draws.values())) == len(draws)


def test_secret_streams_do_not_follow_from_the_public_seed():
    public = {s.name for s in Stream if not s.is_secret}
    assert public == {
        "INITIALISATION",
        "PROBE",
        "VALIDATION",
        "PRETRAINING",
        "SPECTRUM",
    }
    for stream in Stream:
        pair = [first(RandomStreams(5), stream, 0) for _ in range(2)]
        assert (pair[0] == pair[1]) == (not stream.is_secret)


def test_public_streams_do_not_follow_from_the_secret():
    a = RandomStreams(1, unsafe_reproducible_noise=3)
    b = RandomStreams(2, unsafe_reproducible_noise=3)
    for stream in Stream:
        assert (first(a, stream, 0) == first(b, stream, 0)) == stream.is_secret


def test_a_seed_is_drawn_where_none_is_given():
    assert RandomStreams().seed != RandomStreams().seed


def test_the_operating_system_gives_256_bits():
    bits = max(RandomStreams(0)._secret.bit_length() for _ in range(50))
    assert 250 <= bits <= 256


def test_torch_seeds_are_64_bit_and_addressed():
    streams = RandomStreams(4)
    seeds = {streams.torch_seed(Stream.FORWARD, step) for step in range(100)}
    assert len(seeds) == 100
    assert max(seeds).bit_length() > 60
    torch.Generator().manual_seed(max(seeds))
    assert streams.torch_seed(Stream.FORWARD, 0) in seeds
    again = RandomStreams(4).torch_seed(Stream.PROBE, 0)
    assert again == streams.torch_seed(Stream.PROBE, 0)


@pytest.mark.parametrize(
    "leak",
    [pickle.dumps, copy.copy, copy.deepcopy, lambda s: s.__reduce_ex__(4)],
    ids=["pickle", "copy", "deepcopy", "reduce"],
)
def test_streams_cannot_be_copied_or_pickled(leak):
    streams = RandomStreams(0)
    with pytest.raises(CurvedpError, match="secret"):
        leak(streams)


@pytest.mark.parametrize("leak", [pickle.dumps, copy.deepcopy])
def test_what_holds_streams_cannot_be_copied_either(leak):
    with pytest.raises(CurvedpError, match="secret"):
        leak({"nested": NoiseState(RandomStreams(0))})


def test_no_repr_shows_the_secret():
    streams = RandomStreams(7, unsafe_reproducible_noise=SECRET)
    for text in (repr(streams), str(streams), repr(NoiseState(streams)), f"{streams}"):
        assert str(SECRET) not in text
        assert "unsafe" in text
    assert "operating system" in repr(RandomStreams(7))


def test_whether_noise_is_reproducible_is_known():
    assert RandomStreams(0, unsafe_reproducible_noise=0).is_unsafe
    assert not RandomStreams(0).is_unsafe


@pytest.mark.parametrize("value", [-1, True])
@pytest.mark.parametrize("name", ["seed", "unsafe_reproducible_noise"])
def test_impossible_seeds_are_refused(name, value):
    with pytest.raises(ConfigurationError, match=name):
        RandomStreams(**{name: value})


def test_normals_have_the_shape_and_are_float32():
    streams = RandomStreams(0)
    generator = np.random.default_rng(0)
    for shape in ((), (3,), (2, 0), (2, 3, 4)):
        drawn = streams.normals(torch.Size(shape), generator)
        assert drawn.shape == shape
        assert drawn.dtype == torch.float32


def test_noise_is_given_again_with_the_entropy_that_drew_it():
    """An earlier sitting paid for step 3 as well, and we have made it again."""
    earlier, streams = RandomStreams(0), RandomStreams(0)
    like = [torch.zeros(50)]
    lost = earlier.standard_normals(like, 2, 0)[0].clone()
    streams.continue_run(0, dict.fromkeys([2, 3], earlier.reveal_secret()))
    own = streams.standard_normals(like, 3, 1)[0].clone()
    assert torch.equal(streams.standard_normals(like, 3, 1, again=True)[0], own)
    assert torch.equal(streams.standard_normals(like, 2, 0, again=True)[0], lost)
