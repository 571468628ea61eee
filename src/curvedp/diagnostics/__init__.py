"""The doctor: can a model be trained privately, at what cost, and what to change.

What curvature looks like and what it does to a private step is in
:mod:`curvedp.diagnostics.geometry`.

diagnosis = diagnose(model, inputs=torch.zeros(2, 3, 32, 32))
print(diagnosis)
model, changes = fix(model)
"""

from curvedp.diagnostics.examine import diagnose
from curvedp.diagnostics.repairs import Change, fix
from curvedp.diagnostics.report import Cost, Diagnosis, LayerReport, Problem, Verdict
from curvedp.diagnostics.subjects import Subject, load_subject
from curvedp.diagnostics.writing import write_fixed

__all__ = [
    "Change",
    "Cost",
    "Diagnosis",
    "LayerReport",
    "Problem",
    "Subject",
    "Verdict",
    "diagnose",
    "fix",
    "load_subject",
    "write_fixed",
]
