"""All messages in one module, for code that handles messages of several sides."""

# ruff: noqa: F403
from __future__ import annotations

from holdfast.protocol.commit import *
from holdfast.protocol.messages.agent import *
from holdfast.protocol.messages.memory import *
from holdfast.protocol.messages.orders import *
from holdfast.protocol.messages.plans import *
from holdfast.protocol.messages.progress import *
from holdfast.protocol.messages.worker import *
from holdfast.protocol.names import *
from holdfast.protocol.plan import *
from holdfast.protocol.state import *
