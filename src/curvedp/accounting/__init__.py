"""Events, accountants, calibration and the ledger: what a run costs, and the proof.

Importing this needs neither ``dp_accounting`` nor data; asking for epsilon needs the
former.
"""

from curvedp.accounting.accountants import (
    Accountant,
    PLDAccountant,
    RDPAccountant,
    get_accountant,
)
from curvedp.accounting.calibrate import calibrate_sigma, calibrate_steps, epsilon_of
from curvedp.accounting.events import (
    ComposedEvent,
    CyclicGaussianEvent,
    Event,
    GaussianEvent,
    PoissonGaussianEvent,
    RepeatAndSelectEvent,
    SeenGaussianEvent,
    event_from_json,
    repeated,
    sequential,
    tally,
)
from curvedp.accounting.gaussian import GaussianAccountant
from curvedp.accounting.ledger import Ledger, read_ledger
from curvedp.accounting.memory import MemoryLedger
from curvedp.accounting.records import LedgerHeader, LedgerRecord, Note, Payment
from curvedp.accounting.selection import Repeats, calibrate_selected_sigma

__all__ = [
    "Accountant",
    "ComposedEvent",
    "CyclicGaussianEvent",
    "Event",
    "GaussianAccountant",
    "GaussianEvent",
    "Ledger",
    "LedgerHeader",
    "LedgerRecord",
    "MemoryLedger",
    "Note",
    "PLDAccountant",
    "Payment",
    "PoissonGaussianEvent",
    "RDPAccountant",
    "RepeatAndSelectEvent",
    "Repeats",
    "SeenGaussianEvent",
    "calibrate_selected_sigma",
    "calibrate_sigma",
    "calibrate_steps",
    "epsilon_of",
    "event_from_json",
    "get_accountant",
    "read_ledger",
    "repeated",
    "sequential",
    "tally",
]
