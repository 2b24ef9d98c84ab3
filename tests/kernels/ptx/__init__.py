"""An emulator of the PTX that Triton compiles for sm_80 and sm_90, for tests on machines without a GPU.

parse.py         the text of a kernel → instructions
translate.py     instructions → a Python generator that runs a warp
arithmetic.py    roundings, conversions, and products of matrices
memory.py        global and shared memory, with a check of every access for races
machine.py       a grid of blocks; the launches of `triton_attention.launch`, compiled and run here
"""
