"""What callers import from here: events."""

from .event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
