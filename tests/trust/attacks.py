"""The kinds of attack that are made on a run, and where: ``make trust`` runs them all.

Each kind is a file of tests; what it reaches for is refused, or the distance by which
one example moves a sum is measured.
"""

from __future__ import annotations

#: By kind: files below ``tests``.
ATTACKS = {
    "state that a pass leaves in the model": "train/test_state_past_noise.py",
    "a model that is changed after attaching": "train/test_changed_after_attach.py",
    "the same in traced and recorded passes": "train/test_attacks_in_modes.py",
    "coupling at the size and precision of the run": "train/test_coupling_at_size.py",
    "mixing that is rare, rows that are not finite": "train/test_rare_coupling.py",
    "augmentations that mix rows": "train/test_views.py",
    "collate functions that sort, filter, split": "train/test_collate.py",
    "padding that a neighbour changes": "train/test_padding.py",
    "rows that the loop changes": "train/test_rows.py",
    "iterators, workers and streams": "train/test_loader_rules.py",
    "contributions that cancel in a large batch": "clipping/test_cancelling.py",
    "ranks of a launcher": "train/test_launchers.py",
    "what fails only when it is paid": "train/test_before_payment.py",
    "rates that follow the private loss": "train/test_schedulers.py",
    "private data that is declared public": "train/test_declared_public.py",
    "records in errors of the user's code": "hostile/test_user_code.py",
    "records in any output": "hostile/test_no_record_in_output.py",
    "ledgers of strangers": "hostile/test_hostile_ledgers.py",
    "run folders of strangers": "hostile/test_hostile_runs.py",
    "files of strangers": "hostile/test_hostile_arrays.py",
    "settings of strangers": "hostile/test_hostile_configs.py",
    "names that import code": "experiments/test_consent.py",
    "clients that collude": "federated/test_colluding.py",
    "messages and rounds of strangers": "federated/test_hardening.py",
    "an account for each round": "federated/test_strangers_app.py",
    "tuning that is counted": "experiments/test_sweeps_paid.py",
    "crashes at any point": "crash",
}
