"""How fast fedbench is: ratios of things timed in turn in one run; `python -m benchmarks -h`.

A benchmark is a module of this folder with `measure(options) -> Iterator[Row]`; its name is its
file's. Modules with an underscore at the front are what benchmarks share.
"""
