"""All clients but one tell the server all they know: what is left of the one."""

import math

import pytest
import torch

from curvedp.accounting import GaussianEvent, get_accountant, repeated

from .test_secure import make_world, play, secure

HONEST, OTHERS = 0, (1, 2, 3)


def test_colluders_are_left_with_one_share_whose_noise_keeps_the_promise(monkeypatch):
    rounds = 3
    world = make_world(
        sizes=(30, 50, 20, 40), view=secure(colluding=3), rounds=rounds, epsilon=2.0,
        hidden=100,
    )  # fmt: skip
    shares, sums = {}, {}

    def recorded(number, answer):
        def masked_answer(task):
            update = answer(task)
            shares[number, task.round] = update.release
            return update

        return masked_answer

    for number, client in world.clients.items():
        monkeypatch.setattr(
            client, "masked_answer", recorded(number, client.masked_answer)
        )
    close = world.server.close_sum

    def close_sum(total):
        sums[world.server.round] = total.values
        return close(total)

    monkeypatch.setattr(world.server, "close_sum", close_sum)
    play(world)
    assert len(sums) == rounds
    noise = []
    for at, total in sums.items():
        for name, value in total.items():
            known = sum(shares[i, at].values[name].double() for i in OTHERS)
            left = value.double() - known
            own = shares[HONEST, at].values[name].double()
            assert torch.allclose(left, own, rtol=0, atol=1e-9 * float(own.abs().max()))
            noise.append(left.flatten())
    # 1,603 coordinates a round: the sum of 30 clipped gradients hides in their noise
    share = world.clients[HONEST].grid.share(HONEST)
    moved = share.scale * share.bound  # by one record
    spread = float(torch.cat(noise).std()) / moved
    few = 4 / math.sqrt(2 * sum(len(x) for x in noise))  # deviations of a deviation
    event = repeated(GaussianEvent(spread * (1 + few)), rounds)
    facts = world.plan.federation
    alone = get_accountant("pld").epsilon(event, facts.relation, world.plan.delta)
    assert world.plan.epsilon() <= 2.0
    assert alone <= 2.0
    assert alone == pytest.approx(world.plan.epsilon(), rel=0.15)
