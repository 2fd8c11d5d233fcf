"""Every error that rollfab raises on purpose: `from rollfab.errors import BrokerFull`. See fabric/errors.py."""

from .fabric.errors import *  # noqa: F403 - its __all__ says what
from .fabric.errors import __all__ as __all__
