"""The mutator changes what computes, one thing at a time, and nothing else."""

import ast

import pytest

from .mutants import PACKAGES, _Places, all_mutants, path_of, sample


def changed(source, number):
    return ast.unparse(_Places(number).visit(ast.parse(source)))


def test_each_kind_of_change():
    source = "if a < b and not c:\n    raise ValueError('no')\nx = -1.5 * (y + 0)"
    places = _Places()
    places.visit(ast.parse(source))
    assert [after for _, _, after in places.found] == [
        "a >= b",
        "c",
        "a < b or not c",
        "pass",
        "if not (a < b and (not c)):",
        "3.0",
        "1.5",
        "1",
        "y - 0",
        "-1.5 / (y + 0)",
    ]


def test_a_mutant_differs_in_one_place():
    source = "def f(x):\n    '''Doc 1.'''\n    return x + 1 if x > 2 else x * 3"
    places = _Places()
    places.visit(ast.parse(source))
    plain = ast.unparse(ast.parse(source))
    made = {changed(source, k) for k in range(len(places.found))}
    assert len(made) == len(places.found) and plain not in made
    assert all("Doc 1." in text for text in made)


def test_words_and_types_are_left_alone():
    source = (
        "def describe(self):\n    return 1\n"
        "def g(x: Literal[1]) -> None:\n    raise_it(ValueError(f'{1 + 1}', 2))"
    )
    places = _Places()
    places.visit(ast.parse(source))
    assert places.found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_mutants_that_compile(package):
    own = [m for m in all_mutants() if m.package == package]
    assert len(own) > 80
    for mutant in own[::40]:
        source = path_of(mutant.module).read_text()
        compile(changed(source, mutant.number), mutant.module, "exec")


def test_the_sample_is_fixed_and_even():
    chosen = sample(12)
    assert chosen == sample(12) != sample(12, seed=8)
    assert [m.package for m in chosen] == [p for p in PACKAGES for _ in range(3)]
