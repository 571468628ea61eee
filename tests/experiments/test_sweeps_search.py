"""What a sweep searches, and that it cannot open the test part."""

from dataclasses import replace

import numpy as np
import pytest

from curvedp import data
from curvedp.cli.options import read_value
from curvedp.data import npz
from curvedp.errors import ConfigurationError, DataError, UserCodeError
from curvedp.experiments import (
    SweepConfig,
    sweep,
)
from curvedp.experiments.sweeps.config import parse_search
from curvedp.recipes import RECIPES, Choice, Range, Recipe

from .sweeping import make

# -- search spaces ---------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda r: r.name)
def test_what_recipes_declare_is_accepted_by_them(recipe):
    modes = [None, *recipe.modes]
    for mode in modes:
        space = recipe.search_space(mode)
        assert "learning_rate" in space
        for name, where in space.items():
            for value in where.edges():
                recipe.configure(mode=mode, **{name: value})


def test_the_default_learning_rate_lies_inside_its_range():
    for recipe in RECIPES.values():
        where = recipe.search_space()["learning_rate"]
        assert where.low < recipe.learning_rate < where.high, recipe.name


def test_dp_sgd_searches_what_makes_it_strong():
    space = RECIPES["dp-sgd"].search_space()
    assert set(space) >= {"learning_rate", "momentum", "clipping", "clip_norm"}
    assert set(space["clipping"].values) == {"flat", "normalised"}


def test_a_recipe_that_declares_nothing_has_its_rate_searched():
    space = Recipe("mine", "", learning_rate=0.2).search_space()
    assert space == {"learning_rate": Range(0.02, 2.0, log=True)}
    with pytest.raises(ConfigurationError, match="no setting"):
        Recipe("mine", "", search={"nonsense": Range(0, 1)})


def test_search_on_the_command_line():
    texts = ["a=log:0.01:1", "b=linear:0:0.9", "c=flat,normalised", "d=1,2", "e=true"]
    found = parse_search(texts, read_value)
    assert found == {
        "a": Range(0.01, 1, log=True),
        "b": Range(0, 0.9),
        "c": Choice(("flat", "normalised")),
        "d": Choice((1, 2)),
        "e": Choice((True,)),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate", "write NAME="),
        ("=1,2", "write NAME="),
        ("a=cubic:0:1", "neither a range nor a choice"),
        ("a=log:1", "neither a range nor a choice"),
        ("a=log:1:0.1", "empty"),
        ("a=log:1:1", "empty"),
        ("a=log:0:1", "logarithm"),
        ("a=linear:x:1", "no number"),
        ("a=flat,flat", "named twice"),
    ],
)
def test_searches_that_mean_nothing_are_refused(text, words):
    with pytest.raises(ConfigurationError, match=words):
        parse_search([text], read_value)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"nonsense": Range(0, 1)}, "has no setting 'nonsense'"),
        ({"clipping": Range(0, 1)}, "is no number"),
        ({"clipping": Choice(("flat", "square"))}, "square"),
        ({"learning_rate": Range(-1.0, 1.0)}, "learning_rate"),
    ],
)
def test_searches_that_do_not_fit_the_recipe_are_refused(base, space, words):
    with pytest.raises(ConfigurationError, match=words):
        SweepConfig.make(replace(base, recipe_settings={}), space)


def test_whole_numbers_have_ranges_of_whole_numbers(base):
    kfc = replace(base, recipe="dp-kfc", recipe_settings={})
    with pytest.raises(ConfigurationError, match="whole number"):
        SweepConfig.make(kfc, {"rank": Range(1.5, 8)})
    assert "rank" in SweepConfig.make(kfc, {"rank": Range(1, 8)}).search


def test_what_is_fixed_is_not_searched(base):
    made = SweepConfig.make(base)
    assert "learning_rate" not in made.search and "momentum" in made.search
    with pytest.raises(ConfigurationError, match="fixed and searched"):
        SweepConfig.make(base, {"learning_rate": Range(0.1, 1)})


@pytest.mark.parametrize("probe", ["releases", "private"])
def test_what_has_no_effect_beside_what_is_fixed_is_not_searched(base, probe):
    whitened = replace(base, recipe="dp-kfc", recipe_settings={})
    assert "spectral_power" in SweepConfig.make(whitened).search
    other = replace(whitened, recipe_settings={"probe": probe, "refresh": 5})
    found = SweepConfig.make(other).search
    assert "spectral_power" not in found
    assert {"learning_rate", "damping"} <= found.keys()


@pytest.mark.parametrize("law", [None, "geometric"])
def test_an_oracle_is_not_searched(private, law):
    """Its trials have no guarantee, and the sweep would speak for them too."""
    kfc = replace(private, recipe="dp-kfc", recipe_settings={})
    with pytest.raises(ConfigurationError, match="an oracle is searched"):
        SweepConfig.make(kfc, {"probe": Choice(("synthetic", "oracle"))}, law=law)
    honest = {"probe": Choice(("synthetic", "public"))}
    assert "probe" in SweepConfig.make(kfc, honest, law=law).search
    fixed = replace(kfc, recipe_settings={"probe": "oracle"})
    if law is None:  # a sweep of its own, which promises nothing
        assert not SweepConfig.make(fixed).base.private
    else:
        with pytest.raises(ConfigurationError, match="nothing to count"):
            SweepConfig.make(fixed, law=law)


def test_a_search_is_judged_beside_what_is_fixed(base):
    """A share for the curvature means something beside private probes alone."""
    asked = {"curvature_share": Range(0.05, 0.5)}
    kfc = replace(base, recipe="dp-kfc", recipe_settings={})
    with pytest.raises(ConfigurationError, match="curvature_share"):
        SweepConfig.make(kfc, asked)
    measured = replace(kfc, recipe_settings={"probe": "private", "refresh": 5})
    assert SweepConfig.make(measured, asked).search.keys() >= asked.keys()
    with pytest.raises(ConfigurationError, match="curvature_share"):
        SweepConfig.make(measured, {"curvature_share": Range(0.05, 1.5)})


# -- the test part ---------------------------------------------------------------------


def test_a_sweep_needs_no_test_file_and_never_names_it(base, blobs, tmp_path):
    with np.load(blobs) as arrays:
        np.savez(tmp_path / "only.npz", x=arrays["x_train"], y=arrays["y_train"])
    missing = str(tmp_path / "secret-test.npz")
    options = {"num_classes": 3, "test": missing}
    base = replace(base, data=str(tmp_path / "only.npz"), data_options=options)
    done = sweep(make(base), tmp_path / "sweep")
    assert len(done.rows) == 3 and done.split == "validation"
    texts = [p.read_text() for p in (tmp_path / "sweep").rglob("*.json*")]
    assert texts and not any("secret-test" in text for text in texts)
    with pytest.raises(DataError):  # and the file is not there for anybody
        data.load(base.data, **options)


def test_a_loader_that_refuses_the_test_part_is_never_asked(
    base, tmp_path, monkeypatch
):
    original = npz._read_member

    def refusing(path, archive, member):
        assert "test" not in member.filename, "the test part was read"
        return original(path, archive, member)

    monkeypatch.setattr(npz, "_read_member", refusing)
    assert sweep(make(base), tmp_path / "sweep").best is not None
    with pytest.raises(UserCodeError, match="AssertionError"):
        data.load(base.data, **base.data_options)


def test_without_validation_a_sweep_is_refused(config):
    with pytest.raises(ConfigurationError, match="--validation"):
        make(config)


def test_the_test_file_is_no_validation_data(config, tmp_path):
    test = tmp_path / "test.npz"
    np.savez(test, x=np.zeros((3, 6), np.float32), y=np.zeros(3, int))
    config = replace(
        config, validation_data=str(test), data_options={"num_classes": 3, "test": test}
    )
    with pytest.raises(ConfigurationError, match="is the test file"):
        make(config)


def test_what_costs_differently_from_trial_to_trial_is_not_counted(private):
    banded = replace(private, recipe="dp-bandmf", recipe_settings={"bands": 2})
    rates = {"learning_rate": Range(0.1, 1.0)}
    assert "bands" not in SweepConfig.make(banded, rates, law="geometric").search
    chosen = replace(banded, recipe_settings={})
    for search in (rates, {"bands": Choice((2, 4))}):
        with pytest.raises(ConfigurationError, match="bands cost differently"):
            SweepConfig.make(chosen, search, law="geometric")
    replaced = replace(private, privacy={**private.privacy, "relation": "replace-one"})
    with pytest.raises(ConfigurationError, match="the relation is replace-one"):
        SweepConfig.make(replaced, law="geometric")
