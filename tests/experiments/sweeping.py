"""What the tests of sweeps share."""

from dataclasses import replace

from curvedp.experiments import SweepConfig
from curvedp.recipes import Choice, Range

SPACE = {"learning_rate": Range(0.1, 1.0, log=True), "clipping": Choice(("flat",))}


def make(base, trials=3, **options):
    """A sweep of a small run."""
    fixed = {k: v for k, v in base.recipe_settings.items() if k != "learning_rate"}
    base = replace(base, recipe_settings=fixed)
    return SweepConfig.make(base, SPACE, trials=trials, **options)
