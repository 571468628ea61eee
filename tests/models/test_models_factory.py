"""``module:factory``: what it is given, and what is said when that does not work."""

import sys

import pytest
from torch import nn

from curvedp.errors import ConfigurationError
from curvedp.models.factory import StoredName, call_factory, is_factory


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    text = (
        "from torch import nn\n"
        "from curvedp.errors import DataError\n"
        "NUMBER = 3\n"
        "def plain(): return nn.Linear(2, 2)\n"
        "def shaped(input_shape, *, width=2): return nn.Linear(input_shape[0], width)\n"
        "def needy(depth): return nn.Linear(depth, depth)\n"
        "def strict(): raise DataError('no such thing')\n"
    )
    (tmp_path / "factory_of_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def made(name, **options):
    return call_factory(
        f"factory_of_mine:{name}", {"input_shape": (5,), "num_outputs": 7}, options
    )


def test_it_gets_what_it_names_and_the_options():
    assert isinstance(made("plain"), nn.Linear)
    assert made("shaped").in_features == 5
    assert made("shaped", width=4).out_features == 4
    assert made("shaped", input_shape=(9,)).in_features == 9


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("factory_of_mine:absent", "has no 'absent'"),
        ("factory_of_mine:NUMBER", "cannot be called"),
        ("factory_of_mine:needy", "depth"),
        ("no_such_module:make", "cannot be imported"),
        (":make", "cannot be imported"),
    ],
)
def test_what_cannot_be_made_is_named(name, words):
    with pytest.raises(ConfigurationError, match=words):
        call_factory(name, {}, {})


def test_an_error_of_our_own_is_not_dressed_up():
    with pytest.raises(ValueError, match=r"^no such thing"):
        made("strict")


def test_names():
    assert is_factory("module:factory")
    assert not is_factory("mlp")


@pytest.mark.parametrize(
    "name", ["pip.__main__:main", "PIL.__main__:x", "factory_of_mine.__main__:plain"]
)
def test_what_runs_when_it_is_imported_is_not(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pip", "--version"])
    known = set(sys.modules)
    with pytest.raises(ConfigurationError, match="is a library"):
        call_factory(name, {}, {})
    assert not any("__main__" in module for module in set(sys.modules) - known)


def test_a_stored_name_is_shown_and_not_imported():
    sys.modules.pop("factory_of_mine", None)
    with pytest.raises(ConfigurationError, match="repeat it") as caught:
        call_factory(StoredName("factory_of_mine:plain\x1b[2J"), {}, {})
    assert "factory_of_mine" not in sys.modules
    assert "\x1b" not in str(caught.value), "not as it is, for a terminal"
