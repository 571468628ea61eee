"""A map's numbers in memory of its own: all of them, or the map is of another make."""

from dataclasses import replace

import pytest
import torch
from nets import composed
from torch.fx.experimental.proxy_tensor import make_fx

from curvedp.whitening import IdentityWhitener, LayerwiseWhitener, own_map, refill
from curvedp.whitening.diagonal import DiagonalMap
from curvedp.whitening.maps import KroneckerMap
from curvedp.whitening.roots import DiagonalRoot, IdentityRoot

from .maps import WHITENINGS, build, factors, recorded, trainable

CPU = torch.device("cpu")
#: With layers of every kind among them.
NETS = [n for n in composed() if sum(p.numel() for p in n.make().parameters()) < 900]
#: With a floor or a scale that depends on the factors.
OFTEN_OF_ANOTHER_MAKE = {"joint", "joint-printed", "joint-scheduled", "scaled"}

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel:UserWarning"
)


@pytest.fixture(autouse=True)
def stable_condition(monkeypatch):
    """Maps of random nets differ more than those of one net at two times."""
    monkeypatch.setattr("curvedp.whitening.roots._power_above", lambda _: 64.0)


def maps_of(net, whitening, seeds=(1, 2)):
    """Two maps of a net, by the gradients of two batches, and those of a third."""
    model, _, ios = recorded(net, 12, seed=3)
    parameters = trainable(model)
    made = [
        build(whitening, factors(recorded(net, 12, seed=seed)[2]), parameters)
        for seed in seeds
    ]
    return *made, ios, parameters


def computed(whitener, ios, parameters):
    """All that a recorded step takes of a map."""
    values = {
        name: torch.sin(torch.arange(p.numel()) + 1.0).reshape(p.shape)
        for name, p in parameters.items()
    }
    norms = [whitener.sq_norms(io) for io in ios]
    dtypes = [whitener.sum_dtype(io) for io in ios]
    mapped = [*whitener.apply(values).values(), *whitener.adjoint(values).values()]
    return norms, dtypes, mapped


@pytest.mark.parametrize("whitening", WHITENINGS)
@pytest.mark.parametrize("net", NETS[::18], ids=str)
def test_a_refilled_map_computes_what_the_new_one_does(net, whitening):
    first, second, ios, parameters = maps_of(net, whitening)
    own = own_map(first)
    computed(own, ios, parameters)  # keeps what is computed once
    before = computed(first, ios, parameters)
    filled = refill(own, second, CPU)
    wanted = computed(second if filled else first, ios, parameters)
    found = computed(own, ios, parameters)
    assert found[1] == wanted[1]
    for ours, theirs in ((found[0], wanted[0]), (found[2], wanted[2])):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    # and the first map itself is untouched
    again = computed(first, ios, parameters)
    assert all(torch.equal(a, b) for a, b in zip(before[0], again[0], strict=True))


@pytest.mark.parametrize("whitening", WHITENINGS)
def test_what_was_recorded_of_a_map_follows_its_numbers(whitening):
    """Recorded operations do not look at Python's numbers again, as a CUDA graph."""
    (net,) = (n for n in NETS if str(n) == "image-conv")
    first, second, ios, parameters = maps_of(net, whitening)
    own = own_map(first)

    def work(_):
        norms, _, mapped = computed(own, ios, parameters)
        return [*norms, *mapped]

    with torch.no_grad():
        work(None)  # once before it is recorded, as in curvedp.cuda
        recorded_work = make_fx(work)(torch.zeros(()))
        wanted = computed(
            second if refill(own, second, CPU) else first, ios, parameters
        )
        found = recorded_work(torch.zeros(()))
    for ours, theirs in zip(found, [*wanted[0], *wanted[2]], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("whitening", sorted(set(WHITENINGS) - OFTEN_OF_ANOTHER_MAKE))
def test_most_maps_are_of_one_make(whitening):
    net = next(n for n in NETS if "Conv" in str(n.make()) or "Linear" in str(n.make()))
    first, second, ios, parameters = maps_of(net, whitening)
    own = own_map(first)
    computed(own, ios, parameters)
    assert refill(own, second, CPU)


def test_tensors_stay_where_they_are():
    first, second, ios, parameters = maps_of(NETS[0], "a-rank-3")
    own = own_map(first)
    computed(own, ios, parameters)
    places = [x.data_ptr() for layer in own.maps for x in held(layer.tensors())]
    assert refill(own, second, CPU)
    now = [x.data_ptr() for layer in own.maps for x in held(layer.tensors())]
    assert now == places and places


def held(value):
    if isinstance(value, dict):
        return [x for inner in value.values() for x in held(inner)]
    return [value] if isinstance(value, torch.Tensor) else []


def changed(whitener, **changes):
    """The same maps, but for one of them."""
    layer, *others = whitener.maps
    names = [n for own in whitener.maps for n in own.names]
    return LayerwiseWhitener([replace(layer, **changes), *others], names)


@pytest.mark.parametrize("what", ["scale", "kind", "rank", "dtype", "elsewhere"])
def test_another_make_is_seen(what):
    first, second, ios, parameters = maps_of(NETS[0], "a-rank-3")
    own = own_map(first)
    before = computed(own, ios, parameters)
    root = second.maps[0].right
    new = {
        "scale": lambda: changed(second, scale=2.0),
        "kind": IdentityWhitener,
        "rank": lambda: changed(
            second,
            right=replace(
                root, vectors=root.vectors[..., :2], values=root.values[..., :2]
            ),
        ),
        "dtype": lambda: changed(second, right=replace(root, tail=root.tail.float())),
        "elsewhere": lambda: second,
    }[what]()
    device = torch.device("meta") if what == "elsewhere" else CPU
    assert not refill(own, new, device)
    after = computed(own, ios, parameters)  # nothing of it was copied
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))


def test_another_condition_is_another_make(monkeypatch):
    first, second, ios, parameters = maps_of(NETS[0], "a-rank-3")
    own = own_map(first)
    computed(own, ios, parameters)
    monkeypatch.setattr("curvedp.whitening.roots._power_above", lambda _: 128.0)
    assert not refill(own, second, CPU)


class Elsewhere:
    """A map that is not of this package: it cannot be known what it consists of."""

    def __deepcopy__(self, memo):
        raise AssertionError("copied")


def test_a_map_of_ones_own_kind_is_taken_as_it_is():
    mine = Elsewhere()
    assert own_map(mine) is mine
    assert refill(mine, mine, CPU)
    assert not refill(mine, Elsewhere(), CPU)


class Foreign:
    """A map of one layer that is not of this package, with a number that moves."""

    names = ("a",)

    def __init__(self):
        self.scale = 1.0

    def __deepcopy__(self, memo):
        raise AssertionError("copied")


def test_a_map_with_a_part_of_ones_own_kind_is_taken_as_it_is():
    foreign, scales = Foreign(), torch.ones(2, 3)
    first, second = (
        LayerwiseWhitener([foreign, DiagonalMap({"b": k * scales})], ["a", "b"])
        for k in (1, 2)
    )
    own = own_map(first)
    assert own is first
    assert not refill(own, second, CPU)
    assert torch.equal(scales, torch.ones(2, 3))


def of_two_layers(first, second):
    """Maps of two layers from what stands for each of them."""
    if isinstance(first, torch.Tensor):
        maps = [DiagonalMap({"a": first}), DiagonalMap({"b": second})]
    else:
        maps = [
            KroneckerMap(name, None, torch.Size([2, 3]), 1, IdentityRoot(), root)
            for name, root in (("a", first), ("b", second))
        ]
    return LayerwiseWhitener(maps, ["a", "b"])


ONES = torch.ones(3, 3)
#: What two layers have in common in the recorded map; what they have in the next one.
COMMON = {
    "one root": (
        (DiagonalRoot(ONES[0]),) * 2,
        (DiagonalRoot(2 * ONES[0]), DiagonalRoot(3 * ONES[0])),
    ),
    "one tensor": ((ONES[:2],) * 2, (2 * ONES[:2], 3 * ONES[:2])),
    "one memory": ((ONES[:2], ONES[1:]), (2 * ONES[:2], 3 * ONES[:2])),
    "entries": (
        (torch.ones(8).as_strided((2, 3), (1, 1)), ONES[:2]),
        (torch.arange(1.0, 7).reshape(2, 3), ONES[:2]),
    ),
}


@pytest.mark.parametrize("what", COMMON)
def test_what_layers_had_in_common_they_need_not_have_later(what):
    first, second = (of_two_layers(*roots) for roots in COMMON[what])
    values = {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
    own = own_map(first)
    own.apply(values)
    wanted = second if refill(own, second, CPU) else first
    for name, value in own.apply(values).items():
        assert torch.equal(value, wanted.apply(values)[name]), name
