"""Training together without pooling data: clients, server, and who sees what."""

from curvedp.federated.plan import FederatedPlan
from curvedp.federated.views import Federation, Observer, Unit, View

__all__ = ["FederatedPlan", "Federation", "Observer", "Unit", "View"]
