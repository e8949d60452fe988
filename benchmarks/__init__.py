"""Benchmarks of fedbench's speed; see `python -m benchmarks -h`.

A benchmark is a module of this folder that defines `measure(options) -> Iterator[Row]`; the file
name is the benchmark's name. Modules that start with an underscore are helpers.
"""
