"""Audits: attacks that prove lower bounds on epsilon, for any recipe, model and data.

result = audit(model, "cross-entropy", dataset, "dp-sgd", epsilon=3.0, delta=1e-5,
               batch_size=256, epochs=10)
print(result)
"""

from curvedp.auditing.audit import audit
from curvedp.auditing.bounds import (
    Claim,
    Rates,
    clopper_pearson,
    epsilon_at,
    epsilon_of_mu,
    fitted_epsilon,
    mu_at,
)
from curvedp.auditing.canaries import Canaries
from curvedp.auditing.evidence import Evidence, Proof, judge
from curvedp.auditing.one_run import Guesses, guess, one_run_epsilon, one_run_p_value
from curvedp.auditing.plots import plot_audits
from curvedp.auditing.result import AuditResult
from curvedp.auditing.step import StepAudit, audit_step
from curvedp.auditing.worst_case import audit_all, audit_worst_case

__all__ = [
    "AuditResult",
    "Canaries",
    "Claim",
    "Evidence",
    "Guesses",
    "Proof",
    "Rates",
    "StepAudit",
    "audit",
    "audit_all",
    "audit_step",
    "audit_worst_case",
    "clopper_pearson",
    "epsilon_at",
    "epsilon_of_mu",
    "fitted_epsilon",
    "guess",
    "judge",
    "mu_at",
    "one_run_epsilon",
    "one_run_p_value",
    "plot_audits",
]
