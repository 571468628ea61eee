"""Nets of every kind pass the check of coupling at a physical size, bit by bit."""

import pytest
from nets import ALL, built_in, loss

from curvedp.layers import cover
from curvedp.train.coupling import CouplingCheck
from curvedp.train.passes import ForwardPrecision


def checked(net, rows, precision=None):
    model = net.make()
    synthesise = net.synthesiser()
    coverage = cover(model, synthesise, loss)
    forward = ForwardPrecision(precision, model)
    return CouplingCheck(model, coverage, synthesise, loss, forward, rows).attached()


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("net", list(ALL)[4::9], ids=str)
def test_ordinary_nets_pass_without_a_difference(net, precision):
    assert checked(net, 12, precision).effect == 0


@pytest.mark.parametrize("net", built_in(), ids=str)
def test_models_of_the_package_pass_at_full_size(net):
    assert checked(net, 150).effect == 0
