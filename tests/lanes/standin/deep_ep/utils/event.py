"""Events where DeepEP b306af06 keeps them, on a device where everything has happened."""


class EventHandle:
    """A CUDA event."""

    def current_stream_wait(self) -> None:
        """There is nothing to wait for."""


class EventOverlap:
    """What calls return, and what V1 takes; V2 takes the EventHandle inside."""

    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """There is nothing to wait for."""
