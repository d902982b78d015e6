"""Inductor's kernels are kept between runs; compiling C++ takes seconds."""

from __future__ import annotations

from tests.dynamo.installed import keep_kernels

keep_kernels()
