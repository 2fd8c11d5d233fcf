"""Every error that rollfab raises on purpose: `from rollfab.errors import BrokerFull`. See
fabric/contract/errors.py.
"""

from .fabric.contract.errors import *  # noqa: F403 - its __all__ says what
from .fabric.contract.errors import __all__ as __all__
