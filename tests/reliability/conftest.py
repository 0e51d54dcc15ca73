"""Property tests here check numbers, not speed: a busy machine must not fail them."""

from hypothesis import settings

settings.register_profile("numbers", deadline=None)
settings.load_profile("numbers")
