"""Fewer examples of hypothesis than its default."""

from hypothesis import settings

settings.register_profile("room", max_examples=40)
settings.load_profile("room")
