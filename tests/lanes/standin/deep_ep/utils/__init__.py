"""As b306af06 has it: EventHandle alone."""

from .event import EventHandle as EventHandle
