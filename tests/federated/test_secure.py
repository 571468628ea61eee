"""Sums under masks: what they are, what they cost, and what is refused."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from curvedp.barrier import ClippedSum
from curvedp.errors import ConfigurationError, DataError, RoundError
from curvedp.federated import FederatedPlan, Federation, View
from curvedp.federated.flower import (
    FlowerAsk,
    client_number,
)
from curvedp.federated.in_process import in_process_grid
from curvedp.federated.rounds import asking, run_rounds
from curvedp.federated.secure import MODULUS, SumGrid, Total
from curvedp.noise import LatticeShare, NoiseState, RandomStreams

from .worlds import World

SECURE = "secure-aggregate"


def secure(dropouts=0, colluding=0):
    return View.of(SECURE, dropouts=dropouts, colluding=colluding)


def make_world(sizes=(30, 50, 20, 40), view=None, **settings):
    server = {"sums_only": True, **settings.pop("server", {})}
    return World(sizes, view=view or secure(1), server=server, **settings)


def adding(world, drop=()):
    """The sum as the protocol gives it, without the protocol."""

    def ask(task, asked):
        updates = [world.clients[i].masked_answer(task) for i in asked if i not in drop]
        names = updates[0].release.values
        return Total(
            tuple(updates),
            {n: sum(u.release.values[n] for u in updates) for n in names},
        )

    return ask


# -- the grid --------------------------------------------------------------------------


def plan_for(sizes=(2500.0,) * 20, view=None, noise=31.0, **more):
    federation = Federation(tuple(map(float, sizes)), 70, **more)
    return FederatedPlan.make(
        federation, view or secure(), bound=1.0, delta=1e-5, noise_multiplier=noise
    )


@pytest.mark.parametrize("sizes", [(2500,) * 20, (10, 3000, 500), (1, 1, 1)])
@pytest.mark.parametrize("coordinates", [10, 100_000])
def test_all_shares_fit_the_modulus_and_noise_fits_the_range(sizes, coordinates):
    plan = FederatedPlan.make(
        Federation(tuple(map(float, sizes)), 5),
        secure(),
        bound=1.0,
        delta=1e-5,
        noise_multiplier=3.0,
    )
    grid = SumGrid.of(plan, coordinates)
    assert grid.levels * len(sizes) < MODULUS
    for client in range(len(sizes)):
        share = grid.share(client)
        assert share.largest + 12 * share.noise_std <= grid.half_range
        assert math.frexp(grid.spacing)[0] == 0.5  # a power of two, so float64 is exact


def test_rounding_is_paid_for_as_sensitivity_and_costs_little():
    grid = SumGrid.of(plan_for(), 650)
    share = grid.share(0)
    moved = 1.0 + grid.spacing * math.sqrt(650)
    due = math.hypot(31.0 / math.sqrt(20) * moved, 4 * grid.spacing)
    assert share.noise_std == pytest.approx(due, rel=1e-12)
    assert 1.0 < grid.widening() < 1.005


@pytest.mark.parametrize("sizes", [(50, 50, 50), (20, 50, 200, 45), (5, 500, 500)])
def test_no_client_is_hidden_less_than_the_plan_says(sizes):
    plan = plan_for(sizes, view=secure(), noise=4.0)
    grid = SumGrid.of(plan, 5000)
    promised = plan.federation.seen_noise(plan.view, 4.0)
    extra = grid.spacing * math.sqrt(5000)
    shares = [grid.share(i) for i in range(len(sizes))]
    # what explains the rounding is not counted as noise
    total = math.sqrt(sum(s.noise_std**2 - (4 * grid.spacing) ** 2 for s in shares))
    for share in shares:
        assert total / (share.scale * 1.0 + extra) >= promised * (1 - 1e-12)


def test_a_share_is_on_the_grid_clamped_and_has_its_noise():
    share = LatticeShare(2.0, 1.0, 0.5, 2.0**-6, 3.0, 40_000)
    values = {"w": torch.zeros(40_000)}
    values["w"][0] = 1e4  # far beyond what was declared
    clipped = ClippedSum(values, 1.0, "none", 0)
    streams = RandomStreams(0, unsafe_reproducible_noise=3)
    release, _ = share.update(clipped, NoiseState(streams))
    steps = release.values["w"] / 2.0**-6
    assert torch.equal(steps, steps.round())
    assert abs(float(release.values["w"][0])) < 3.0 + 6 * share.noise_std
    assert float(release.values["w"][1:].std()) == pytest.approx(
        share.noise_std, rel=0.02
    )
    assert release.noise_std == share.noise_std


def test_the_sum_of_rounded_shares_has_the_law_that_is_claimed():
    """Exact probabilities: convolved rounded normals against the claimed bound."""
    from scipy.stats import norm

    steps, clients = 4.0, 3  # the coarsest noise that can be: its rounding share alone
    r = math.hypot(3.0, steps)
    m = np.arange(-80, 81)
    one = norm.cdf(m + 0.5, scale=r) - norm.cdf(m - 0.5, scale=r)
    law = one
    for _ in range(clients - 1):
        law = np.convolve(law, one)
    centre = len(law) // 2
    # against a shift of 2 steps: hockey-stick divergence below the Gaussian's whose
    # variance is without the 16 steps^2
    shift, std = 2, math.sqrt(clients * r * r - steps * steps)
    p, q = law[centre - 100 : centre + 101], law[centre - 102 : centre + 99]
    mu = shift / std
    for epsilon in (0.0, 0.1, 0.3, 0.6):
        found = np.maximum(p - math.exp(epsilon) * q, 0).sum()
        promised = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(
            -mu / 2 - epsilon / mu
        )
        assert found <= promised + 1e-13
        # and not below by more than those 16 of 75 steps^2 make out
        assert epsilon or found > 0.85 * promised


@pytest.mark.parametrize(
    ("view", "sizes", "more", "words"),
    [
        (secure(), (30, 30), {}, "cannot hide"),
        (secure(dropouts=2), (30, 30, 30, 30), {}, "cannot hide"),
        (secure(dropouts=1, colluding=2), (30, 30, 30, 30), {}, "cannot hide"),
        (secure(), (30, 30, 30), {"client_rate": 0.5}, "all clients are asked"),
    ],
)
def test_a_federation_that_cannot_be_hidden_is_refused(view, sizes, more, words):
    with pytest.raises(ConfigurationError, match=words):
        make_world(sizes, view=view, **more)


# -- rounds ----------------------------------------------------------------------------


def test_the_sum_moves_the_model_as_single_updates_do():
    summed, single = make_world(noise=1e-4), World((30, 50, 20, 40), noise=1e-4)
    run_rounds(summed.server, adding(summed))
    run_rounds(single.server, asking(single.clients))
    for name, value in summed.parameters().items():
        assert torch.allclose(value, single.parameters()[name], atol=2e-5)
    assert summed.server.ledger.count() == 4


def test_a_single_update_of_a_plan_for_sums_never_leaves():
    world = make_world()
    with pytest.raises(RoundError, match="leave singly"):
        world.clients[0].answer(world.server.open_round())
    with pytest.raises(RoundError, match="came singly"):
        world.server.close_round([])
    with pytest.raises(ConfigurationError, match="sums alone"):
        World((30, 30, 30), view=secure())


def test_a_share_is_sent_once_also_after_a_restart(tmp_path):
    world = make_world(folder=tmp_path)
    task = world.server.open_round()
    world.clients[0].masked_answer(task)
    with pytest.raises(RoundError, match="already"):
        world.clients[0].masked_answer(task)
    world.clients[0].close()
    again = world.client(0)
    with pytest.raises(RoundError, match="already"):
        again.masked_answer(task)
    assert not list((tmp_path / "client-0").glob("journal/*"))  # a share is a secret


def test_a_lost_sum_is_paid_for_and_moves_nothing():
    world = make_world(rounds=3)
    before = world.parameters()
    world.server.open_round()
    report = world.server.close_sum(Total(reason="lost"))
    assert report.accepted == ()
    assert world.server.round == 1
    assert world.server.ledger.count() == 1
    for name, value in world.parameters().items():
        assert torch.equal(value, before[name])
    run_rounds(world.server, adding(world))
    assert world.server.round == 3


def test_a_sum_that_misses_more_than_declared_or_has_a_wrong_share_moves_nothing():
    world = make_world(rounds=3)
    before = world.parameters()
    made = []
    run_rounds(world.server, adding(world, {1, 2}), rounds=1, on_round=made.append)
    assert made[0].accepted == ()
    task = world.server.open_round()
    total = adding(world)(task, range(4))
    twice = Total((*total.senders, total.senders[0]), total.values)
    assert world.server.close_sum(twice).accepted == ()
    other = make_world(rounds=3, noise=2.0)
    wrong = adding(other)(other.server.open_round(), range(4))
    world.server.open_round()
    report = world.server.close_sum(wrong)
    assert report.accepted == ()
    assert report.refused
    for name, value in world.parameters().items():
        assert torch.equal(value, before[name])


def test_a_sum_whose_masks_did_not_cancel_moves_nothing():
    """What is left of masks is uniform, and beyond what shares can add up to."""
    world = make_world(rounds=2)
    before, grid = world.parameters(), world.server.grid
    total = adding(world)(world.server.open_round(), range(4))
    words = np.random.default_rng(0).integers(0, MODULUS, 10_000)
    noise = iter((words * grid.spacing - 4 * grid.half_range).tolist())
    spoilt = {
        name: torch.tensor([next(noise) for _ in range(value.numel())]).view_as(value)
        for name, value in total.values.items()
    }
    report = world.server.close_sum(Total(total.senders, spoilt))
    assert report.accepted == ()
    assert "masks" in report.refused[0]
    for name, value in world.parameters().items():
        assert torch.equal(value, before[name])


def test_the_largest_sum_that_can_be_is_taken():
    grid = SumGrid.of(plan_for((30, 50, 20, 40)), 5)
    assert grid.could_be({"w": torch.tensor([4.0, -4.0]) * grid.half_range}, 4)
    assert not grid.could_be({"w": torch.tensor([0.0, 4.1]) * grid.half_range}, 4)


# -- Flower's protocol -----------------------------------------------------------------


def play(world, *, spoil=None, spoil_answer=None, tries=2, told=None, before=None):
    pytest.importorskip("flwr.app")
    pytest.importorskip("cryptography")
    from curvedp.federated.secagg import SecureAsk, make_secure_client_app

    client_app = make_secure_client_app(lambda c: world.clients[client_number(c)])
    seen = []
    if before is not None:
        before()

    def app(message, context):
        if spoil is not None:
            spoil(message, client_number(context))
        seen.append(message)
        stage = message.content.config_records.get("secaggplus_configs", {})
        stage = stage.get("stage")
        answer = client_app(message, context)
        seen.append(answer)
        if spoil_answer is not None and client_number(context) == 2:
            answer = spoil_answer(stage, answer) or answer
        return answer

    refusals = [] if told is None else told
    ask = FlowerAsk(
        in_process_grid(app, len(world.sizes)), patience=0.1,
        on_refusal=lambda client, why: refusals.append((client, why)),
    )  # fmt: skip
    made = []
    secure_ask = SecureAsk(ask, world.server.grid, tries=tries)
    run_rounds(world.server, secure_ask, on_round=made.append, tries=1)
    return made, seen


@pytest.mark.parametrize("recipe", ["dp-fedsofim", "dp-fedkfc"])
def test_rounds_under_masks_are_the_rounds(recipe):
    settings = {"recipe": recipe, "rounds": 3, "noise": 2.0, "hidden": 4}
    if recipe == "dp-fedkfc":
        settings |= {"refresh": 2, "probe_size": 32}
    carried, direct = make_world(**settings), make_world(**settings)
    made, _ = play(carried)
    assert [r.accepted for r in made] == [(0, 1, 2, 3)] * 3
    run_rounds(direct.server, adding(direct))
    for name, value in carried.parameters().items():
        assert torch.allclose(value, direct.parameters()[name], atol=1e-6)


def test_nothing_but_masked_numbers_and_declared_facts_leaves():
    world = make_world(rounds=1, noise=2.0)
    _, seen = play(world)
    masked = []
    for message in seen:
        assert all(not list(a) for a in message.content.array_records.values()) or (
            "fitins.parameters" in message.content.array_records
        )
        for name, record in message.content.config_records.items():
            if name == "fitres.metrics":
                assert set(record) == {
                    "client", "run_id", "agreement", "frame", "round", "noise_std"
                }  # fmt: skip
        for record in message.content.metric_records.values():
            assert dict(record) == {"num_examples": 1}
        for record in message.content.config_records.values():
            for value in record.values():
                first = value[0] if isinstance(value, list) and value else b""
                if isinstance(first, bytes) and first.startswith(b"\x93NUMPY"):
                    masked.append(value)
    assert len(masked) == 4
    from flwr.common import bytes_to_ndarray

    numbers = np.concatenate(
        [bytes_to_ndarray(b).ravel() for value in masked for b in value]
    )
    # uniform over the whole modulus: mean 1/2 and std 1/sqrt(12), to a few per cent
    assert np.mean(numbers / MODULUS) == pytest.approx(0.5, abs=0.1)
    assert np.std(numbers / MODULUS) == pytest.approx(0.289, abs=0.06)


def test_a_client_that_drops_with_its_share_is_taken_out_of_the_sum():
    world = make_world(rounds=2, noise=1.0)

    def spoil(message, client):
        if client == 2 and "fitins.parameters" in message.content.array_records:
            raise RoundError("it died")

    made, _ = play(world, spoil=spoil)
    assert [r.accepted for r in made] == [(0, 1, 3), (0, 1, 3)]
    other = make_world(rounds=2, noise=1.0)
    run_rounds(other.server, adding(other, {2}))
    for name, value in world.parameters().items():
        assert torch.allclose(value, other.parameters()[name], atol=1e-6)


def test_more_drops_than_declared_lose_the_round_and_nothing_is_unmasked():
    world = make_world(rounds=1, noise=1.0)

    def spoil(message, client):
        if client in (1, 2) and "fitins.parameters" in message.content.array_records:
            raise RoundError("it died")

    made, _ = play(world, spoil=spoil)
    assert made[0].accepted == ()


def test_a_round_that_breaks_before_a_share_left_is_tried_again():
    world = make_world(rounds=1, noise=1.0)
    failures = iter([True])

    def spoil(message, client):
        sent = message.content.config_records.get("secaggplus_configs")
        if sent is not None and client == 1 and next(failures, False):
            raise RoundError("it was slow")

    made, _ = play(world, spoil=spoil)
    assert made[0].accepted == (0, 1, 2, 3)


SETUP, SHARE, COLLECT, UNMASK = (
    "setup", "share_keys", "collect_masked_vectors", "unmask"
)  # fmt: skip


def without_records(answer):
    answer.content.config_records.clear()


def shorter(key):
    def spoil(answer):
        answer.content.config_records["secaggplus_configs"][key].pop()

    return spoil


def without(key):
    def spoil(answer):
        del answer.content.config_records["secaggplus_configs"][key]

    return spoil


def foreign(key):
    def spoil(answer):
        values = answer.content.config_records["secaggplus_configs"][key]
        answer.content.config_records["secaggplus_configs"][key] = [b"x"] * len(values)

    return spoil


def another_number(answer):
    answer.content.config_records["fitres.metrics"]["client"] = 1


def without_facts(answer):
    del answer.content.config_records["fitres.metrics"]


@pytest.mark.parametrize(
    ("stage", "spoil", "words"),
    [
        (SETUP, without_records, "no records"),
        (SETUP, without("pk1"), "missing or has other"),
        (SHARE, without_records, "no records"),
        (SHARE, shorter("dsts"), "do not fit"),
        (COLLECT, without_records, "no records"),
        (COLLECT, shorter("masked_params"), "the model's shape"),
        (COLLECT, foreign("masked_params"), "cannot be read"),
        (COLLECT, another_number, "another client"),
        (COLLECT, without_facts, "cannot be read"),
        (UNMASK, without_records, "no records"),
        (UNMASK, shorter("shares"), "do not fit"),
    ],
)
def test_a_reply_that_is_not_whole_is_that_of_a_client_that_dropped(
    stage, spoil, words
):
    world = make_world(rounds=1, noise=1.0)
    told = []
    made, _ = play(world, tries=4, told=told, spoil_answer=lambda now, answer:
                   spoil(answer) if now == stage else None)  # fmt: skip
    assert {client for client, _ in told} == {2}
    assert words in told[0][1]
    # one that breaks late has its share in the sum
    assert made[0].accepted == ((0, 1, 2, 3) if stage == UNMASK else (0, 1, 3))


@pytest.mark.parametrize(
    ("stage", "spoil"), [(UNMASK, foreign("shares")), (SETUP, None)]
)
def test_foreign_bytes_lose_or_refuse_a_round_and_not_the_server(stage, spoil):
    world = make_world(rounds=1, noise=1.0, view=secure(0))

    def spoil_answer(now, answer):
        if now == stage and spoil is not None:
            spoil(answer)
        elif now == stage:
            answer.content.config_records["secaggplus_configs"]["pk1"] = b"x"

    if stage == UNMASK:
        made, _ = play(world, spoil_answer=spoil_answer)
        assert made[0].accepted == ()
    else:
        with pytest.raises(RoundError, match="too few clients"):
            play(world, spoil_answer=spoil_answer)
        assert world.clients[0].ledger.count() == 0


def test_a_sum_of_another_model_is_lost():
    common = pytest.importorskip("flwr.common")
    from curvedp.federated.secagg import _Attempt

    world = make_world(rounds=1)
    task = world.server.open_round()
    facts = {
        "client": 1, "run_id": "r", "agreement": "a", "frame": "identity", "round": 0,
        "noise_std": 1.0,
    }  # fmt: skip
    for arrays in ([np.zeros(3)], [np.zeros(3)] * 5):
        sent = SimpleNamespace(
            metrics=facts, parameters=common.ndarrays_to_parameters(arrays)
        )
        attempt = _Attempt(task, {7: 1})
        attempt.aggregate_fit(1, [(SimpleNamespace(node_id=7), sent)], [])
        assert attempt.total.values is None
        assert attempt.total.reason == "the sum is not of the model"


def test_what_a_record_may_have_caused_does_not_leave_under_masks_either():
    world = make_world(rounds=1, noise=1.0)

    def fail(task):
        raise DataError("row 7: age is 203")

    world.clients[2].masked_answer = fail
    made, seen = play(world)
    assert made[0].accepted == (0, 1, 3)
    told = [m.error.reason for m in seen if m.has_error()]
    assert told == ["it cannot answer; its own log says why"]


def test_too_few_clients_refuse_the_round_and_nothing_is_spent():
    world = make_world(rounds=1, noise=1.0)

    def spoil(message, client):
        if client in (1, 2):
            raise RoundError("it is away")

    with pytest.raises(RoundError, match="too few clients"):
        play(world, spoil=spoil)
    assert world.clients[0].ledger.count() == 0


def guarded(grid, **asked):
    app = pytest.importorskip("flwr.app")
    from flwr.common.secure_aggregation.secaggplus_constants import (
        RECORD_KEY_CONFIGS,
    )

    from curvedp.federated.masking import guard

    record = app.ConfigRecord({k.replace("__", ":"): v for k, v in asked.items()})
    content = app.RecordDict({RECORD_KEY_CONFIGS: record})
    guard(app.Message(content, 1, "train"), grid)


def test_a_client_refuses_what_an_honest_server_would_not_ask():
    pytest.importorskip("flwr.app")
    from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage

    grid = make_world().server.grid
    setup = {
        Key.STAGE: Stage.SETUP,
        Key.SAMPLE_NUMBER: 4,
        Key.SHARE_NUMBER: 4,
        Key.THRESHOLD: 3,
        Key.CLIPPING_RANGE: grid.half_range,
        Key.TARGET_RANGE: grid.levels,
        Key.MOD_RANGE: MODULUS,
        Key.MAX_WEIGHT: 1.0,
    }
    guarded(grid, **setup)
    for change in (
        {Key.THRESHOLD: 2},
        {Key.SHARE_NUMBER: 3},
        {Key.SAMPLE_NUMBER: 2, Key.SHARE_NUMBER: 2},
        {Key.TARGET_RANGE: 2},
        {Key.CLIPPING_RANGE: 2 * grid.half_range},
        {Key.MAX_WEIGHT: 2.0},
    ):
        with pytest.raises(RoundError, match="another secure aggregation"):
            guarded(grid, **{**setup, **change})
    unmask = {Key.STAGE: Stage.UNMASK, Key.DEAD_NODE_ID_LIST: [4]}
    guarded(grid, **unmask, **{Key.ACTIVE_NODE_ID_LIST: [1, 2, 3]})
    for active, words in (([1, 2, 4], "twice"), ([1, 2, 2], "twice"), ([1, 2], "few")):
        with pytest.raises(RoundError, match=words):
            guarded(grid, **unmask, **{Key.ACTIVE_NODE_ID_LIST: active})
    collect = {
        Key.STAGE: Stage.COLLECT_MASKED_VECTORS,
        Key.CIPHERTEXT_LIST: [b"", b""],
    }
    with pytest.raises(RoundError, match="twice"):
        guarded(grid, **collect, **{Key.SOURCE_LIST: [2, 2]})
    with pytest.raises(RoundError, match="few"):
        guarded(grid, **collect, **{Key.SOURCE_LIST: [2]})
    with pytest.raises(RoundError, match="no stage"):
        guarded(grid, **{Key.STAGE: "nothing"})


def test_masks_use_all_bits_of_their_seed():
    pytest.importorskip("cryptography")
    from curvedp.federated.masking import mask_words

    seed = bytes(range(32))
    # two seeds that fold into the same 32 bits, as Flower's own masks would see them
    swapped = seed[4:8] + seed[:4] + seed[8:]
    shapes = [(1000,), (3, 5), ()]
    first, other = (mask_words(s, MODULUS, shapes) for s in (seed, swapped))
    assert [m.shape for m in first] == shapes
    assert not np.array_equal(first[0], other[0])
    assert np.array_equal(first[0], mask_words(seed, MODULUS, shapes)[0])
    assert first[0].min() >= 0
    assert first[0].max() < MODULUS


def test_flowers_own_masks_are_not_used():
    pytest.importorskip("flwr.app")
    import importlib

    from curvedp.federated import masking, secagg

    secagg.make_secure_client_app(lambda context: None)
    secagg._workflow()
    for part in (masking.CLIENT_PART, masking.SERVER_PART):
        module = importlib.import_module(f"flwr.{part}")
        assert module.pseudo_rand_gen is masking.mask_words


def test_an_app_that_was_sent_to_another_process_has_the_strong_masks(monkeypatch):
    """There, Flower's module is as Flower made it until a message comes."""
    pytest.importorskip("flwr.app")
    import importlib

    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    from curvedp.federated import masking

    module = importlib.import_module(f"flwr.{masking.CLIENT_PART}")
    settings = {"rounds": 2, "noise": 2.0}
    carried, direct = make_world(**settings), make_world(**settings)
    made, _ = play(
        carried,
        before=lambda: monkeypatch.setattr(module, "pseudo_rand_gen", pseudo_rand_gen),
    )
    assert [r.accepted for r in made] == [(0, 1, 2, 3)] * 2
    run_rounds(direct.server, adding(direct))
    for name, value in carried.parameters().items():
        assert torch.allclose(value, direct.parameters()[name], atol=1e-6)
