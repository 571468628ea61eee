"""A Flower app of somebody else's that trains with ``make_private`` in each round."""

import pytest
import torch
from torch import nn

from curvedp import make_private
from curvedp.errors import BudgetError, ConfigurationError
from curvedp.federated.in_process import in_process_grid

from .worlds import CLASSES, FEATURES, records

flower = pytest.importorskip("flwr.app")
clientapp = pytest.importorskip("flwr.clientapp")

ROUNDS, STEPS = 3, 2


def app(seen, run_dir):
    """Every message is a round; ``seen`` gets what each of them says was spent."""
    made = clientapp.ClientApp()

    @made.train()
    def train(message, context):
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with make_private(
                model, optimizer, records(20, seed=1), loss="cross-entropy",
                noise_multiplier=1.0, sample_rate=0.5, steps=2 * STEPS,
                expected_batch_size=10, physical_batch_size=8, run_dir=run_dir,
            ) as private:  # fmt: skip
                done = private.step
                for x, y in private.loader:
                    private.loss(private.model(x), y).backward()
                    private.optimizer.step()
                    if private.step == done + STEPS:
                        break
                seen.append(private.statement().facts["steps_paid"])
        except (ConfigurationError, BudgetError) as error:
            seen.append(error)
        return flower.Message(flower.RecordDict(), reply_to=message)

    return made


def play(run_dir):
    seen = []
    grid = in_process_grid(app(seen, run_dir), 1)
    for _ in range(ROUNDS):
        content = flower.RecordDict()
        message = grid.create_message(content, dst_node_id=1, message_type="train")
        grid.push_messages([message])
    return seen


def test_an_account_for_each_round_is_refused():
    for refusal in play(None):
        assert "account of its own" in str(refusal)


def test_one_ledger_holds_all_rounds_and_ends_them(tmp_path):
    *counted, refusal = play(tmp_path / "client")
    assert counted == [STEPS, 2 * STEPS]
    assert isinstance(refusal, BudgetError)
