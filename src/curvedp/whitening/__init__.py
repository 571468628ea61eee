"""Fixed, public linear maps that reshape each gradient before it is clipped."""

from curvedp.whitening.base import Whitener
from curvedp.whitening.identity import IdentityWhitener

__all__ = ["IdentityWhitener", "Whitener"]
