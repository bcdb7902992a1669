"""Pagewick measured beside others, in the same run. Not part of the package."""
