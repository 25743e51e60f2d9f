"""Callers import events from here."""

from .event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
