"""Training together without pooling data: clients, server, and who sees what."""

from curvedp.federated.client import Client
from curvedp.federated.common import Shared
from curvedp.federated.messages import Task, Update
from curvedp.federated.plan import FederatedPlan
from curvedp.federated.server import RoundReport, Server
from curvedp.federated.views import Federation, Observer, Unit, View

__all__ = [
    "Client",
    "FederatedPlan",
    "Federation",
    "Observer",
    "RoundReport",
    "Server",
    "Shared",
    "Task",
    "Unit",
    "Update",
    "View",
]
