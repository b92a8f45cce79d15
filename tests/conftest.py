"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
settings.register_profile("any", ANY)
settings.register_profile("same", ANY, derandomize=True)  # of `make test`: what fails there fails everywhere
settings.load_profile("any")
