"""The keystream: standard AES-256-CTR, addressed, never leaving its process."""

import copy
import os
import pickle

import numpy as np
import pytest

from curvedp.errors import ConfigurationError, CurvedpError
from curvedp.noise.keystream import Keystream

KEY = bytes(range(32))

# NIST SP 800-38A, F.5.5 CTR-AES256.Encrypt
NIST_KEY = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
NIST_COUNTER = {
    "stream": 0xF0,
    "attempt": 0xF1F2F3F4,
    "step": 0xF5F6F7F8F9,
    "block": 0xFAFBFCFDFEFF,
}
NIST_PLAIN = (
    "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
)
NIST_CIPHER = (
    "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
    "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
)


@pytest.mark.parametrize("portions", [[8], [2, 2, 2, 2], [1, 4, 3]])
def test_the_keystream_is_the_standard_one(portions):
    reader = Keystream(bytes.fromhex(NIST_KEY)).at(**NIST_COUNTER)
    stream = b"".join(reader.words(n).tobytes() for n in portions)
    plain = bytes.fromhex(NIST_PLAIN)
    cipher = bytes(a ^ b for a, b in zip(stream, plain, strict=True))
    assert cipher.hex() == NIST_CIPHER


def test_addresses_have_keystreams_of_their_own():
    keystream = Keystream(KEY)
    seen = {}
    for stream in (1, 2, 255):
        for step in (0, 1, 2**40 - 1):
            for attempt in (0, 1, 2**32 - 1):
                words = keystream.reader(stream, step, attempt).words(64)
                seen[stream, step, attempt] = words
    everything = np.concatenate(list(seen.values()))
    assert len(np.unique(everything)) == len(everything)
    assert np.array_equal(keystream.reader(2, 1, 0).words(64), seen[2, 1, 0])


def test_an_address_ends_before_the_next_one_begins():
    reader = Keystream(KEY).at(stream=1, attempt=0, step=0, block=2**48 - 1)
    reader.words(2)
    with pytest.raises(ConfigurationError, match="left"):
        reader.words(1)


@pytest.mark.parametrize(
    "fields",
    [{"step": 2**40}, {"step": -1}, {"attempt": 2**32}, {"stream": 256}],
)
def test_an_address_outside_of_its_field_is_refused(fields):
    with pytest.raises(ConfigurationError, match=next(iter(fields))):
        Keystream(KEY).reader(**{"stream": 1, "step": 0, **fields})


def test_every_keystream_has_a_key_of_its_own():
    first, second = (Keystream().reader(1, 0).words(16) for _ in range(2))
    assert not np.any(first == second)


def test_only_256_bit_keys_are_taken():
    with pytest.raises(ConfigurationError, match="32 bytes"):
        Keystream(bytes(16))


@pytest.mark.parametrize("leak", [pickle.dumps, copy.copy, copy.deepcopy])
def test_the_key_cannot_be_copied(leak):
    with pytest.raises(CurvedpError, match="secret"):
        leak(Keystream())


def test_no_repr_shows_the_key():
    text = repr(Keystream(KEY)) + str(vars(Keystream(KEY)))
    assert KEY.hex() not in text
    assert repr(KEY) not in text


def test_a_forked_process_is_refused(monkeypatch):
    keystream = Keystream()
    other = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: other)
    with pytest.raises(CurvedpError, match="forked"):
        keystream.reader(1, 0)
